"""Reads the attributes of GenAI instrumentations into the columns of `spans`, and finds rewards in them.

Forms: OpenTelemetry GenAI (AutoGen, pydantic-ai), OpenInference (DSPy, CrewAI, smolagents …), Traceloop, LangSmith,
Vercel's AI SDK, Claude Code, AgentOps, Langfuse and MLflow.

Rewards: the attributes `rl.reward` and `agentlightning.reward.N.value`, and the event `gen_ai.evaluation.result` with
`gen_ai.evaluation.score.value`, on a span or as a log record. A reward is for the model answer that its event or its
span names by `gen_ai.response.id`, else for the tool call the span names, else for the whole rollout.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from leyden.libs.contracts.rewards import is_reward
from leyden.libs.contracts.states import GATEWAY_SCOPE, SpanStatus
from leyden.libs.store.records.spans import TRUNCATED, NewReward, NewSpan
from leyden.services.collector.otlp import STATUS_ERROR, STATUS_OK, Attributes, WireEvent, WireLog, WireSpan
from leyden.services.collector.wire import MAX_RECORD_BYTES

EVALUATION_EVENT = "gen_ai.evaluation.result"
MAX_NAME_LENGTH = 512

_KINDS_BY_OPERATION = {
    "chat": "llm",
    "text_completion": "llm",
    "generate_content": "llm",
    "execute_tool": "tool",
    "invoke_agent": "agent",
    "create_agent": "agent",
    "invoke_workflow": "agent",
}
_KINDS_BY_OPENINFERENCE = {"LLM": "llm", "TOOL": "tool", "AGENT": "agent", "EVALUATOR": "reward"}
_KINDS_BY_NAME = {
    **{"llm": "llm", "llm_request": "llm", "chat_model": "llm", "generation": "llm", "tool": "tool"},
    **{"agent": "agent", "workflow": "agent", "interaction": "agent"},
    **{"ai.toolcall": "tool", "ai.generatetext": "agent", "ai.streamtext": "agent"},
    **{"ai.generatetext.dogenerate": "llm", "ai.streamtext.dostream": "llm"},
    **{"ai.generateobject.dogenerate": "llm", "ai.streamobject.dostream": "llm"},
}
_KIND_ATTRIBUTES = (
    *("traceloop.span.kind", "langsmith.span.kind", "ai.operationId", "span.type", "agentops.span.kind"),
    *("langfuse.observation.type", "mlflow.spanType"),
)
_TOOL_CALL_IDS = ("gen_ai.tool.call.id", "tool_call.id", "tool.id", "ai.toolCall.id", "tool_use_id")
_TOOL_NAMES = (
    *("gen_ai.tool.name", "tool.name", "ai.toolCall.name", "tool_name", "traceloop.entity.name"),
    "mlflow.spanFunctionName",
)
_FAILURES = {"gen_ai.task.status": "failure", "langfuse.observation.level": "ERROR", "tool.status": "error"}
_TOOL_RESULTS = ("output.value", "gen_ai.completion", "traceloop.entity.output", "gen_ai.tool.call.result")
_PAUSES = frozenset({"GraphInterrupt", "NodeInterrupt", "ParentCommand", "GraphBubbleUp"})
# Both ids are minted by the gateway, so that one seen anywhere names its call.
_MINTED_TOOL_CALL = re.compile(r"call_c[0-9a-f]{24}_\d+")
_MINTED_RESPONSE = re.compile(r"(?:chatcmpl-|cmpl-|resp_|msg_)(c[0-9a-f]{24})")
_LIGHTNING_REWARD = re.compile(r"agentlightning\.reward\.(\d+)\.value")
_MAX_INT8 = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Sender:
    """The attempt that a request speaks for."""

    run_id: str
    rollout_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of a span is kept."""

    attributes: int = 128
    text_length: int = 16_384


def is_pause(error_type: str | None) -> bool:
    """Whether an exception is one of LangGraph's that end no tool: the graph hands over, or waits and runs the tool
    again."""
    return error_type is not None and error_type.rpartition(".")[2] in _PAUSES


class SpanRejected(Exception):
    """A span or log record that cannot be stored; the request's others can."""


def span_row(span: WireSpan, sender: Sender, limits: Limits) -> NewSpan:
    """A span as the store keeps it.

    Raises: SpanRejected: its ids or times are invalid
    """
    if len(span.trace_id) != 32 or len(span.span_id) != 16 or not int(span.trace_id, 16) or not int(span.span_id, 16):
        raise SpanRejected(
            "a span needs a trace id of 16 bytes and a span id of 8, not all zero, and may have at most"
            f" {MAX_RECORD_BYTES} bytes"
        )
    if not all(map(_is_time, (span.start_ns, span.end_ns, *(event.time_ns for event in span.events)))):
        raise SpanRejected(f"span {span.span_id} has a time outside of 64-bit nanoseconds")
    attributes = span.attributes
    error_type = _error_type(span)
    kind = _kind(span)
    if kind == "tool" and is_pause(error_type):
        # The same tool call has another span later, which is its use.
        kind = "other"
    return NewSpan(
        run_id=sender.run_id,
        rollout_id=sender.rollout_id,
        attempt=sender.attempt,
        trace_id=span.trace_id,
        span_id=span.span_id,
        parent_span_id=span.parent_span_id or None,
        name=_short(span.name) or "",
        kind=kind,
        tool=_tool(span) if kind == "tool" else None,
        status=_status(span, kind, error_type),
        error_type=error_type,
        tool_call_id=_tool_call_id(attributes, kind),
        response_id=_response_id(attributes, kind),
        start_ns=span.start_ns,
        end_ns=span.end_ns,
        # That name is not the agent's to give.
        scope=None if span.scope == GATEWAY_SCOPE else _short(span.scope),
        attributes=_attributes_json(attributes, limits),
    )


def span_rewards(span: WireSpan, row: NewSpan, sender: Sender) -> Iterator[NewReward]:
    """The finite rewards that a span carries, keyed `trace:span:position`; positions are stable across repeats.

    An event has the key of its log record: an SDK may send it as both.
    """
    for position, (name, value, response_id, event) in enumerate(_rewards_on(span)):
        if value is None or not is_reward(value):
            continue
        place = f"{row.trace_id}:{row.span_id}:{position}"
        yield NewReward(
            rollout_id=sender.rollout_id,
            attempt=sender.attempt,
            key=_evaluation_key(span, event) if event is not None and event.time_ns else place,
            run_id=sender.run_id,
            source="telemetry",
            name=name,
            value=value,
            response_id=response_id or row.response_id,
            tool_call_id=row.tool_call_id,
            time_ns=(event.time_ns if event is not None else 0) or span.end_ns,
        )


def has_unusable_reward(telemetry: WireSpan | WireLog) -> bool:
    """Whether a span or log record carries a reward that is no finite number of a usable size: it is none."""
    if isinstance(telemetry, WireSpan):
        values = [value for _, value, _, _ in _rewards_on(telemetry)]
    else:
        values = [_evaluation(telemetry.event.attributes)[1]] if _is_evaluation(telemetry) else []
    return any(value is None or not is_reward(value) for value in values)


def log_reward(log: WireLog, sender: Sender) -> NewReward | None:
    """The reward of an evaluation event sent as a log record; None for every other record.

    A record has no id, so its key is a digest of what it says: a repeat is the same row.

    Raises: SpanRejected: its time is invalid
    """
    attributes = log.event.attributes
    if not _is_evaluation(log):
        return None
    if not _is_time(log.event.time_ns):
        raise SpanRejected("an evaluation result has a time outside of 64-bit nanoseconds")
    name, value, response_id = _evaluation(attributes)
    if value is None or not is_reward(value):
        return None
    return NewReward(
        rollout_id=sender.rollout_id,
        attempt=sender.attempt,
        key=_evaluation_key(log, log.event),
        run_id=sender.run_id,
        source="telemetry",
        name=name,
        value=value,
        response_id=response_id,
        tool_call_id=_short(attributes.get("gen_ai.tool.call.id")),
        time_ns=log.event.time_ns,
    )


def _is_time(time_ns: int) -> bool:
    return 0 <= time_ns <= _MAX_INT8


def _kind(span: WireSpan) -> str:
    attributes = span.attributes
    operation = _KINDS_BY_OPERATION.get(str(attributes.get("gen_ai.operation.name")))
    kind = operation or _KINDS_BY_OPENINFERENCE.get(str(attributes.get("openinference.span.kind")).upper())
    if kind is not None:
        return kind
    for name in _KIND_ATTRIBUTES:
        if kind := _KINDS_BY_NAME.get((_named(attributes, name) or "").lower()):
            return kind
    return "reward" if next(_rewards_on(span), None) else "other"


def _tool(span: WireSpan) -> str:
    for name in _TOOL_NAMES:
        if tool := _named(span.attributes, name):
            return tool
    return _short(span.name.removeprefix("execute_tool ")) or "unknown"


def _named(attributes: Attributes, name: str) -> str | None:
    """A short text. MLflow writes each of its attributes as JSON, texts in quotes."""
    found = _short(attributes.get(name))
    return found.strip('"') or None if found is not None and name.startswith("mlflow.") else found


def _error_type(span: WireSpan) -> str | None:
    named = span.attributes.get("error.type")
    if named is None:
        exceptions = (event.attributes for event in span.events if event.name == "exception")
        named = next((attributes.get("exception.type") or "exception" for attributes in exceptions), None)
    return _short(named)


def _status(span: WireSpan, kind: str, error_type: str | None) -> SpanStatus:
    if is_pause(error_type):
        return SpanStatus.UNSET
    has_failed = any(span.attributes.get(name) == value for name, value in _FAILURES.items())
    if kind == "tool" and not has_failed:
        has_failed = any(_is_failed_message(span.attributes.get(name)) for name in _TOOL_RESULTS)
    if span.status_code == STATUS_ERROR or error_type is not None or has_failed:
        return SpanStatus.ERROR
    # Most instrumentation leaves a success unset; a tool without a sign of failure has succeeded.
    return SpanStatus.OK if span.status_code == STATUS_OK or kind == "tool" else SpanStatus.UNSET


def _is_failed_message(result: object) -> bool:
    """Whether a tool's result is the message in which LangChain or LangChain.js says that the tool failed: its run, and
    so its span, has succeeded."""
    if not isinstance(result, str) or "error" not in result:
        return False
    try:
        found = _object(orjson.loads(result))
    except orjson.JSONDecodeError:
        return False
    # LangSmith and Traceloop name it output, OpenInference data; LangChain serializes it with its fields in kwargs.
    message = _object(found.get("data") if found.get("type") == "tool" else found.get("output"))
    return "error" in (message.get("status"), *(_object(one.get("kwargs")).get("status") for one in (message, found)))


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _tool_call_id(attributes: Attributes, kind: str) -> str | None:
    named = next((attributes[name] for name in _TOOL_CALL_IDS if attributes.get(name)), None)
    if named is None and kind == "tool":
        named = _only_match(_MINTED_TOOL_CALL, attributes)
    return _short(named)


def _response_id(attributes: Attributes, kind: str) -> str | None:
    named = attributes.get("gen_ai.response.id")
    if named is None and kind in {"llm", "tool"}:
        call = _only_match(_MINTED_RESPONSE, attributes)
        named = None if call is None else f"chatcmpl-{call}"
    return _short(named)


def _only_match(pattern: re.Pattern[str], attributes: Attributes) -> str | None:
    """The one match that texts of the attributes hold; None where a whole conversation holds several."""
    found = {match for value in attributes.values() if isinstance(value, str) for match in pattern.findall(value)}
    return found.pop() if len(found) == 1 else None


def _rewards_on(span: WireSpan) -> Iterator[tuple[str, float | None, str | None, WireEvent | None]]:
    if "rl.reward" in span.attributes:
        yield "rl.reward", _number(span.attributes["rl.reward"]), None, None
    lightning = [name for name in span.attributes if name.startswith("agentlightning.reward.")]
    for attribute in sorted(filter(_LIGHTNING_REWARD.fullmatch, lightning)):
        name = span.attributes.get(attribute.removesuffix("value") + "name")
        yield _short(name) or "agentlightning.reward", _number(span.attributes[attribute]), None, None
    for event in span.events:
        if event.name == EVALUATION_EVENT:
            yield *_evaluation(event.attributes), event


def _is_evaluation(log: WireLog) -> bool:
    return EVALUATION_EVENT in (log.event.name, log.event.attributes.get("event.name"))


def _evaluation(attributes: Attributes) -> tuple[str, float | None, str | None]:
    name = _short(attributes.get("gen_ai.evaluation.name")) or EVALUATION_EVENT
    value = _number(attributes.get("gen_ai.evaluation.score.value"))
    return name, value, _short(attributes.get("gen_ai.response.id"))


def _evaluation_key(sent: WireSpan | WireLog, event: WireEvent) -> str:
    facts = orjson.dumps([sent.trace_id, sent.span_id, event.time_ns, *_evaluation(event.attributes)])
    return f"evaluation:{hashlib.sha256(facts).hexdigest()[:32]}"


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)


def _short(value: object) -> str | None:
    return None if value is None else str(value)[:MAX_NAME_LENGTH].replace("\0", "\ufffd") or None


def _attributes_json(attributes: Attributes, limits: Limits) -> str:
    kept = dict(list(attributes.items())[: limits.attributes])
    cut = len(kept) < len(attributes)
    for name, value in kept.items():
        shorter = _cut(value, limits.text_length)
        cut = cut or shorter is not value
        kept[name] = shorter
    if cut:
        kept[TRUNCATED] = True
    text = orjson.dumps(kept).decode()
    # Postgres stores no NUL; a text that spells the escape out keeps its backslash doubled.
    return re.sub(r"(?<!\\)((?:\\\\)*)\\u0000", r"\1\\ufffd", text) if r"\u0000" in text else text


def _cut(value: object, length: int) -> object:
    if isinstance(value, str):
        return value if len(value) <= length else value[:length]
    if isinstance(value, list | dict) and len(orjson.dumps(value)) > length:
        return orjson.dumps(value)[:length].decode(errors="ignore")
    return value
