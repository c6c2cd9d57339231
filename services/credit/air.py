"""Automatic intermediate rewards: what telemetry says of the tools that each call asked for.

AIR turns the return status of tool calls into rewards (Agent Lightning, arXiv 2508.03680, 3.4.2); the paper gives no
formula. Ours: a call earns, for each tool it asked for, the tool's weight when it succeeded and `failure` times the
weight when it failed, nothing when nobody knows.

A span is joined to its call by the first of these that holds; the source is kept with the result:

tool_call_id  `call_<call>_<number>`, an id that the gateway made up and that names the call
response_id   `chatcmpl-<request>`, the id of the answer that asked for the tool
time          the latest call that had arrived when the tool began, one that asked for a tool of this name first
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from leyden.libs.contracts.config import Air
from leyden.libs.contracts.states import SpanStatus
from leyden.services.credit.records import Call, ToolSpan

Source = Literal["tool_call_id", "response_id", "time", "answer"]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A tool that a call asked for, and how it went. Source `answer`: asked for, but no span tells how it went."""

    tool: str
    status: SpanStatus
    source: Source


def tool_uses(calls: Sequence[Call], spans: Sequence[ToolSpan]) -> dict[str, list[ToolUse]]:
    """The tool uses of each call, by call id, in the order they began; calls without any are absent.

    Args: calls: in order of arrival
    """
    joined: dict[str, list[tuple[ToolSpan, Source]]] = {}
    for span in sorted(without_duplicates(spans), key=lambda span: (span.start_ns, span.span_id)):
        found = _call_of(span, calls, joined)
        if found is not None:
            joined.setdefault(found[0].id, []).append((span, found[1]))
    uses = {call.id: _uses(call, joined.get(call.id, [])) for call in calls}
    return {call_id: found for call_id, found in uses.items() if found}


def air_reward(uses: Iterable[ToolUse], air: Air) -> float:
    """The intermediate reward of a call from the status of its tools, before `alpha`.

    >>> air_reward([ToolUse("memory", SpanStatus.OK, "time")], Air(weights={"memory": 0.3}))
    0.3
    """
    return sum((_earned(use, air) for use in uses), 0.0)


def without_duplicates(spans: Sequence[ToolSpan]) -> list[ToolSpan]:
    """One span per use of a tool; where several libraries saw the same use, an error outweighs an ok.

    The same use: an equal tool call id; or one tool, one span inside the other in time, the outer the inner's parent
    or of another library (AutoGen and OpenInference both report, and OpenInference says ok of what failed).
    """
    kept: list[ToolSpan] = []
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns, span.span_id)):
        twin = next((i for i, other in enumerate(kept) if _same_use(other, span)), None)
        if twin is None:
            kept.append(span)
        else:
            kept[twin] = _merged(kept[twin], span)
    return kept


def _same_use(outer: ToolSpan, inner: ToolSpan) -> bool:
    if outer.tool_call_id is not None and inner.tool_call_id is not None:
        return outer.tool_call_id == inner.tool_call_id
    inside = outer.start_ns <= inner.start_ns and inner.end_ns <= outer.end_ns
    related = inner.parent_span_id == outer.span_id or inner.scope != outer.scope
    return outer.tool == inner.tool and inside and related


def _merged(first: ToolSpan, second: ToolSpan) -> ToolSpan:
    statuses = {first.status, second.status}
    status = next(s for s in (SpanStatus.ERROR, SpanStatus.OK, SpanStatus.UNSET) if s in statuses)
    return ToolSpan(
        span_id=first.span_id,
        parent_span_id=first.parent_span_id,
        scope=first.scope,
        tool=first.tool,
        status=status,
        tool_call_id=first.tool_call_id or second.tool_call_id,
        response_id=first.response_id or second.response_id,
        start_ns=first.start_ns,
        end_ns=first.end_ns,
    )


def _call_of(
    span: ToolSpan, calls: Sequence[Call], joined: dict[str, list[tuple[ToolSpan, Source]]]
) -> tuple[Call, Source] | None:
    if span.tool_call_id is not None and (call := call_of_tool(span.tool_call_id, calls)) is not None:
        return call, "tool_call_id"
    if span.response_id is not None:
        for call in calls:
            if call.response_id == span.response_id:
                return call, "response_id"
    earlier = [call for call in calls if call.sequence <= span.start_ns and call.completed]
    asked = [call for call in earlier if _open_asks(call, span.tool, joined.get(call.id, []))]
    return ((asked or earlier)[-1], "time") if earlier else None


def call_of_tool(tool_call_id: str, calls: Iterable[Call]) -> Call | None:
    """The call whose answer asked for a tool under this id."""
    for call in calls:
        if any(asked.tool_call_id == tool_call_id for asked in call.asked):
            return call
    return None


def _open_asks(call: Call, tool: str, joined: Sequence[tuple[ToolSpan, Source]]) -> bool:
    """Whether the call asked for the tool more often than spans of it were joined so far."""
    return sum(a.tool == tool for a in call.asked) > sum(span.tool == tool for span, _ in joined)


def _uses(call: Call, joined: Sequence[tuple[ToolSpan, Source]]) -> list[ToolUse]:
    uses = [ToolUse(span.tool, SpanStatus(span.status), source) for span, source in joined]
    seen = [span.tool for span, _ in joined]
    for asked in call.asked:
        if asked.tool in seen:
            seen.remove(asked.tool)
        else:
            uses.append(ToolUse(asked.tool, SpanStatus.UNSET, "answer"))
    return uses


def _earned(use: ToolUse, air: Air) -> float:
    weight = air.weights.get(use.tool, air.default_weight)
    match use.status:
        case SpanStatus.OK:
            return weight
        case SpanStatus.ERROR:
            return air.failure * weight
        case SpanStatus.UNSET:
            return 0.0
