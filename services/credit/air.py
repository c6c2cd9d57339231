"""Automatic intermediate rewards (AIR) from the status of the tools that each call asked for.

AIR turns the return status of tool calls into rewards (Agent Lightning, arXiv 2508.03680, 3.4.2); the paper gives no
formula. Ours: for each tool that its sampled answer asked for, a call earns the tool's weight when the tool succeeded,
`failure` times the weight when it failed; at most `MAX_REWARD` in all. A tool call whose status nothing
shows, as after a lost span, earns what the tool earned on average in the group: no sibling is better or worse by it. A
text that may be the result or the bare message of a failure is worth the middle of both where the group has a status of
its tool, else nothing: which texts are bare depends on how the tool ended, so that an average of the others is none of
theirs. A result without content has the status that `null` says, one that the wire format marks as an error has
failed, and a tool with `failures` has the status of its rules, with and without a span. Rule `own` with an `alpha`
leaves average and middle out (`group.py`).

The agent writes its own spans, so a span counts only as the result of a tool call that the model sampled, and each
sampled tool call has one result. The first of these finds it; the source is stored with the result:

tool_call_id  `call_<call>_<number>`, an id that the gateway made up and that names the tool call
response_id   the answer, such as `chatcmpl-<request>`: its first tool call of this name that has no result yet
time          the latest call before the tool began that sampled a tool call of this name that has no result yet
text          an answer without tool calls asks once for each tool that it names: some agents ask in plain text

A tool call without a span takes its status from the conversation (`results.py`), unless `air.from_results` is off:

result        a later call sends its result
bare          a later call sends a text that shows neither a success nor a failure
malformed     the model sampled no valid JSON, and no result came: it failed
hung          a tool of the attempt's last call, and the attempt ran into its timeout: it failed; also an endless span,
              and a tool that took longer than `air.tool_seconds`: by its span, or by the time from the answer's last
              byte to the call with its result, where the answer asked for no other tool
lost          a tool of the attempt's last call, and the agent failed: the tool call failed
answer        nothing more is known: the tool was the agent's last, or the agent made another call without its result

An agent can name its span after any word of the answer, so a tool that the operator gave no weight earns nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Literal

from leyden.libs.contracts.config import Air
from leyden.libs.contracts.states import OutcomeKind, SpanStatus
from leyden.services.credit.joins import Ask, OpenAsks, without_duplicates
from leyden.services.credit.records import AskedTool, Call, ToolResult, ToolSpan
from leyden.services.credit.results import is_nothing, status_of

Source = Literal["tool_call_id", "response_id", "time", "text", "result", "bare", "malformed", "hung", "lost", "answer"]
DEFAULTS = Air()
MAX_REWARD = 1.0
_WITHOUT_RESULT: dict[OutcomeKind, Source] = {OutcomeKind.TIMEOUT: "hung", OutcomeKind.AGENT_ERROR: "lost"}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A tool that a call asked for, with its status and the source of that."""

    tool: str
    status: SpanStatus
    source: Source


def tool_uses(
    calls: Sequence[Call],
    spans: Sequence[ToolSpan],
    seen: Sequence[Call] | None = None,
    ending: OutcomeKind | None = None,
    air: Air = DEFAULTS,
) -> dict[str, list[ToolUse]]:
    """The tool uses of each call, by call id, in the order they began; calls that asked for none are absent.

    Args: calls: in order of arrival; seen: the same and those without an answer, whose conversations have results;
        ending: how the attempt's agent ended; None leaves conversations out, for telemetry alone
    """
    uses: dict[str, list[ToolUse]] = {call.id: [] for call in calls}
    results = _results(calls if seen is None else seen)
    in_order = sorted(without_duplicates(spans), key=lambda span: (span.start_ns, span.span_id))
    open_asks = OpenAsks(calls, (span.tool for span in in_order))
    for span in in_order:
        if (found := _ask_of(span, open_asks)) is not None:
            ask, source = found
            ask.is_open = False
            uses[ask.call.id].append(_with_span(ask, span, source, results.get(ask.asked.tool_call_id), air))
    for call, asked in open_asks.rest():
        result = results.get(asked.tool_call_id)
        status, source = SpanStatus.UNSET, "answer"
        if ending is not None:
            status, source = _without_span(call, asked, result, ending if call is calls[-1] else None, air)
        uses[call.id].append(ToolUse(asked.tool, status, source))
    return {call_id: found for call_id, found in uses.items() if found}


def average_factors(uses: Iterable[ToolUse], air: Air) -> dict[str, float]:
    """By tool, the mean factor of its weight over the uses that have a status."""
    factors: dict[str, list[float]] = defaultdict(list)
    for use in uses:
        if use.status is not SpanStatus.UNSET and use.source != "text":
            factors[use.tool].append(1.0 if use.status is SpanStatus.OK else air.failure)
    return {tool: sum(found) / len(found) for tool, found in factors.items()}


def air_reward(uses: Iterable[ToolUse], air: Air, averages: Mapping[str, float] = MappingProxyType({})) -> float:
    """The intermediate reward of a call from the status of its tools, before `alpha`.

    Args: averages: the factor of a tool whose status nothing shows; 0 for others

    >>> air_reward([ToolUse("memory", SpanStatus.OK, "time")], Air(weights={"memory": 0.3}))
    0.3
    """
    earned = sum((_earned(use, air, averages) for use in uses), 0.0)
    return max(-MAX_REWARD, min(MAX_REWARD, earned))


def _results(calls: Sequence[Call]) -> dict[str, ToolResult]:
    """The first result of each tool call, by its id."""
    named = [result for call in calls for result in call.results if result.tool_call_id]
    found = {str(result.tool_call_id): result for result in reversed(named)}
    for before, call in pairwise(calls):
        unnamed = [result for result in call.results if result.tool_call_id is None]
        if len(unnamed) != len(before.asked):
            # Not one for each tool call of the call before, in their order: the first is for all.
            unnamed = unnamed[:1] * len(before.asked)
        for asked, result in zip(before.asked, unnamed, strict=False):
            found.setdefault(asked.tool_call_id, result)
    return found


def _with_span(ask: Ask, span: ToolSpan, source: Source, result: ToolResult | None, air: Air) -> ToolUse:
    """A span's own error counts, and so does its success, unless the run or the wire format has another word for the
    result: Claude Code leaves the span of a tool that failed without a status."""
    tool = ask.asked.tool
    if span.end_ns < span.start_ns or _is_late(span.end_ns - span.start_ns, air):
        return ToolUse(tool, SpanStatus.ERROR, "hung")
    status = SpanStatus(span.status)
    if result is not None and (
        tool in air.failures or (status is not SpanStatus.ERROR and (result.is_error or is_nothing(result)))
    ):
        return ToolUse(tool, *_of_result(result, air, tool))
    return ToolUse(tool, status, source)


def _of_result(result: ToolResult, air: Air, tool: str) -> tuple[SpanStatus, Source]:
    status = status_of(result, air, tool)
    return status, "bare" if status is SpanStatus.UNSET and not is_nothing(result) else "result"


def _waited(call: Call, result: ToolResult) -> int:
    """Nanoseconds from an answer's last byte to the request with a result; 0 where either is unknown."""
    if call.received_at is None or result.arrived is None:
        return 0
    return result.arrived - call.received_at


def _is_late(nanoseconds: int, air: Air) -> bool:
    return air.tool_seconds is not None and nanoseconds > air.tool_seconds * 1e9


def _without_span(
    call: Call, asked: AskedTool, result: ToolResult | None, ending: OutcomeKind | None, air: Air
) -> tuple[SpanStatus, Source]:
    """Args: ending: how the agent ended after this call; None where it made another call."""
    if result is not None:
        if len(call.asked) == 1 and _is_late(_waited(call, result), air):
            return SpanStatus.ERROR, "hung"
        return _of_result(result, air, asked.tool)
    if asked.is_malformed:
        return SpanStatus.ERROR, "malformed"
    source = None if ending is None else _WITHOUT_RESULT.get(ending)
    return (SpanStatus.ERROR, source) if source else (SpanStatus.UNSET, "answer")


def _ask_of(span: ToolSpan, open_asks: OpenAsks) -> tuple[Ask, Source] | None:
    is_known, ask = open_asks.named(span.tool_call_id)
    if is_known:
        return (ask, "tool_call_id") if ask is not None else None
    is_known, ask = open_asks.answered(span.response_id, span.tool)
    if not is_known:
        ask = open_asks.latest(span.start_ns, span.tool)
    if ask is None:
        return None
    return ask, "text" if ask.in_text else "response_id" if is_known else "time"


def _earned(use: ToolUse, air: Air, averages: Mapping[str, float]) -> float:
    weight = air.weights.get(use.tool, 0.0)
    match use.status:
        case SpanStatus.OK:
            return weight
        case SpanStatus.ERROR:
            return air.failure * weight
        case SpanStatus.UNSET:
            if use.source == "bare":
                return weight * (1.0 + air.failure) / 2 if use.tool in averages else 0.0
            # An empty result is no lost one: the run says that it earns nothing.
            return 0.0 if use.source == "result" else weight * averages.get(use.tool, 0.0)
