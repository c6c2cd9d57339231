import json
from dataclasses import replace
from typing import Any

import pytest

from leyden.libs.contracts.states import GATEWAY_SCOPE
from leyden.libs.store.records.spans import NewReward, NewSpan
from leyden.services.collector.conventions import Limits, Sender, SpanRejected, log_reward, span_rewards, span_row
from leyden.services.collector.decode import UNUSABLE_REWARD, decode_logs, decode_traces
from leyden.services.collector.otlp import WireEvent, WireLog, WireSpan

SENDER = Sender("run-a", "run-a.0.1", 2)
CALL = "c" + "0123456789abcdef01234567"


def wire(name: str = "span", status: int = 0, events: list[WireEvent] | None = None, **attributes: Any) -> WireSpan:
    """A span whose attribute names have dots for double underscores."""
    named = {key.replace("__", "."): value for key, value in attributes.items()}
    return WireSpan("ab" * 16, "cd" * 8, "", name, 1, 2, status, "scope", named, events or [])


def row(span: WireSpan, limits: Limits = Limits(100, 1000)) -> NewSpan:  # noqa: B008
    return span_row(span, SENDER, limits)


def test_no_agent_gives_its_spans_the_scope_of_the_gateway() -> None:
    named = wire(gen_ai__operation__name="execute_tool")
    assert row(named).scope == "scope"
    assert row(replace(named, scope=GATEWAY_SCOPE)).scope is None


@pytest.mark.parametrize(
    ("span", "kind", "tool"),
    [
        (wire("chat m", gen_ai__operation__name="chat"), "llm", None),
        (wire("execute_tool f", gen_ai__operation__name="execute_tool"), "tool", "f"),
        (wire("x", gen_ai__operation__name="execute_tool", gen_ai__tool__name="g"), "tool", "g"),
        (wire("invoke_agent a", gen_ai__operation__name="invoke_agent"), "agent", None),
        (wire("h", openinference__span__kind="TOOL"), "tool", "h"),
        (wire("x", openinference__span__kind="TOOL", tool__name="i"), "tool", "i"),
        (wire("x", openinference__span__kind="LLM"), "llm", None),
        (wire("x", openinference__span__kind="CHAIN"), "other", None),
        (wire("ai.toolCall", ai__operationId="ai.toolCall", ai__toolCall__name="j"), "tool", "j"),
        (wire("ai.generateText", ai__operationId="ai.generateText"), "agent", None),
        (wire("ai.streamText.doStream", ai__operationId="ai.streamText.doStream"), "llm", None),
        (wire("k.tool", traceloop__span__kind="tool", traceloop__entity__name="k"), "tool", "k"),
        (wire("x", traceloop__span__kind="task"), "other", None),
        (wire("l", langsmith__span__kind="tool"), "tool", "l"),
        (wire("claude_code.tool", span__type="tool", tool_name="m"), "tool", "m"),
        (wire("claude_code.llm_request", span__type="llm_request"), "llm", None),
        (wire("x", mlflow__spanType='"TOOL"', mlflow__spanFunctionName='"n"'), "tool", "n"),
        (wire("o", mlflow__spanType='"TOOL"'), "tool", "o"),
        (wire("x", rl__reward=1.0), "reward", None),
        (wire("GET /"), "other", None),
    ],
)
def test_kinds_of_all_conventions(span: WireSpan, kind: str, tool: str | None) -> None:
    assert (row(span).kind, row(span).tool) == (kind, tool)


@pytest.mark.parametrize(
    ("status", "evidence", "expected"),
    [
        (0, {}, ("ok", None)),
        (1, {}, ("ok", None)),
        (2, {}, ("error", None)),
        (0, {"error__type": "timeout"}, ("error", "timeout")),
        (1, {"error__type": "timeout"}, ("error", "timeout")),
        (0, {"events": [WireEvent("exception", {"exception.type": "ValueError"})]}, ("error", "ValueError")),
        (0, {"events": [WireEvent("exception", {})]}, ("error", "exception")),
        (1, {"gen_ai__task__status": "failure"}, ("error", None)),
        (0, {"langfuse__observation__level": "ERROR"}, ("error", None)),
    ],
)
def test_a_tool_has_succeeded_without_a_sign_of_failure(
    status: int, evidence: dict[str, Any], expected: tuple[str, str | None]
) -> None:
    found = row(wire(status=status, gen_ai__operation__name="execute_tool", **evidence))
    assert (found.status, found.error_type) == expected


@pytest.mark.parametrize(
    "result",
    [
        {"output__value": '{"type": "tool", "data": {"content": "gone", "status": "error"}}'},
        {"traceloop__entity__output": '{"output": {"lc": 1, "kwargs": {"content": "gone", "status": "error"}}}'},
        {"gen_ai__tool__call__result": '{"lc": 1, "kwargs": {"content": "gone", "status": "error"}}'},
        {"gen_ai__completion": '{"output": {"content": "gone", "status": "error"}}'},
    ],
)
def test_the_message_of_a_tool_that_failed_outweighs_its_span(result: dict[str, Any]) -> None:
    assert row(wire(status=1, openinference__span__kind="TOOL", **result)).status == "error"
    succeeded = {name: text.replace('"status": "error"', '"status": "success"') for name, text in result.items()}
    assert row(wire(status=1, openinference__span__kind="TOOL", **succeeded)).status == "ok"


@pytest.mark.parametrize("status", [1, 2])
def test_a_tool_that_langgraph_pauses_has_no_use_and_no_failure(status: int) -> None:
    event = WireEvent("exception", {"exception.type": "langgraph.errors.GraphInterrupt"})
    found = row(wire(status=status, events=[event], openinference__span__kind="TOOL", tool__name="ask"))
    assert (found.kind, found.tool, found.status) == ("other", None, "unset")


def test_other_spans_keep_an_unset_status() -> None:
    assert row(wire(gen_ai__operation__name="chat")).status == "unset"


def test_ids_are_read_from_their_attributes() -> None:
    found = row(wire(gen_ai__operation__name="execute_tool", gen_ai__tool__call__id="t", gen_ai__response__id="r"))
    assert (found.tool_call_id, found.response_id) == ("t", "r")
    vercel = row(wire(ai__operationId="ai.toolCall", ai__toolCall__id=f"call_{CALL}_1"))
    assert vercel.tool_call_id == f"call_{CALL}_1"


def test_minted_ids_are_found_inside_texts_when_there_is_one() -> None:
    output = f'{{"tool_call_id": "call_{CALL}_0"}}'
    one = row(wire(openinference__span__kind="TOOL", output__value=output))
    assert one.tool_call_id == f"call_{CALL}_0"
    several = row(wire(openinference__span__kind="TOOL", input__value=f"call_{CALL}_0 call_{CALL}_1"))
    assert several.tool_call_id is None
    answer = row(wire(openinference__span__kind="LLM", output__value=f'{{"id": "chatcmpl-{CALL}"}}'))
    assert answer.response_id == f"chatcmpl-{CALL}"
    items = row(wire(openinference__span__kind="LLM", output__value=f'{{"id": "resp_{CALL}"}}, msg_{CALL}_0'))
    assert items.response_id == f"chatcmpl-{CALL}"


def rewards(span: WireSpan) -> list[tuple[str, str, float, str | None]]:
    found: list[NewReward] = list(span_rewards(span, row(span), SENDER))
    return [(one.key.rpartition(":")[2], one.name, one.value, one.response_id) for one in found]


def test_rewards_of_every_spelling() -> None:
    evaluation = {"gen_ai.evaluation.name": "judge", "gen_ai.evaluation.score.value": 0.5}
    span = wire(
        rl__reward=1,
        agentlightning__reward__0__name="style",
        agentlightning__reward__0__value=0.25,
        agentlightning__reward__1__value=0.125,
        events=[
            WireEvent("gen_ai.evaluation.result", evaluation),
            WireEvent("gen_ai.evaluation.result", {**evaluation, "gen_ai.response.id": "r"}),
        ],
    )
    assert rewards(span) == [
        ("0", "rl.reward", 1.0, None),
        ("1", "style", 0.25, None),
        ("2", "agentlightning.reward", 0.125, None),
        ("3", "judge", 0.5, None),
        ("4", "judge", 0.5, "r"),
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", True, None, [1]])
def test_what_is_no_finite_number_is_no_reward(value: object) -> None:
    assert rewards(wire(rl__reward=value)) == []


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e300"])
def test_the_exporter_hears_of_a_reward_that_is_ignored(value: str) -> None:
    score = {"key": "gen_ai.evaluation.score.value", "value": {"doubleValue": value}}
    event = {"name": "gen_ai.evaluation.result", "attributes": [score]}
    span = {"traceId": "1" * 32, "spanId": "2" * 16, "events": [event]}
    spans = {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}
    logs = {"resourceLogs": [{"scopeLogs": [{"logRecords": [{"eventName": event["name"], "attributes": [score]}]}]}]}
    for decode, document in ((decode_traces, spans), (decode_logs, logs)):
        rows = decode(json.dumps(document).encode(), json=True, sender=SENDER, rewards_granted=True)
        assert (rows.rewards, rows.rejected, rows.message) == ([], 0, UNUSABLE_REWARD)


def test_a_reward_is_for_the_call_that_its_span_names() -> None:
    assert rewards(wire(rl__reward=1, gen_ai__response__id="r")) == [("0", "rl.reward", 1.0, "r")]


def test_log_records_have_stable_keys() -> None:
    def log(value: float) -> WireLog:
        return WireLog("", "", WireEvent("gen_ai.evaluation.result", {"gen_ai.evaluation.score.value": value}, 7))

    assert log_reward(log(0.5), SENDER) == log_reward(log(0.5), SENDER)
    assert log_reward(log(0.5), SENDER).key != log_reward(log(0.25), SENDER).key
    assert log_reward(WireLog("", "", WireEvent("other", {}, 7)), SENDER) is None


def test_an_evaluation_that_an_sdk_sends_as_event_and_as_log_record_is_one_reward() -> None:
    number = {"key": "gen_ai.evaluation.score.value", "value": {"doubleValue": 0.5}}
    ids = {"traceId": "1" * 32, "spanId": "2" * 16}
    events = [{"name": "gen_ai.evaluation.result", "timeUnixNano": at, "attributes": [number]} for at in ("7", "8")]
    records = [
        {**ids, "eventName": "gen_ai.evaluation.result", "timeUnixNano": "7", "attributes": [number]},
        {**ids, "eventName": "gen_ai.evaluation.result", "observedTimeUnixNano": "9", "attributes": [number]},
    ]
    spans = {"resourceSpans": [{"scopeSpans": [{"spans": [{**ids, "events": events}]}]}]}
    logs = {"resourceLogs": [{"scopeLogs": [{"logRecords": records}]}]}
    first, second = (
        decode(json.dumps(document).encode(), json=True, sender=SENDER, rewards_granted=True).rewards
        for decode, document in ((decode_traces, spans), (decode_logs, logs))
    )
    assert first[0].key == second[0].key
    assert len({one.key for one in (*first, *second)}) == 3


@pytest.mark.parametrize("time", [str(2**64), "-1", 1e300])
def test_an_evaluation_with_a_time_beyond_64_bits_is_rejected_and_the_others_stay(time: object) -> None:
    score = [{"key": "gen_ai.evaluation.score.value", "value": {"doubleValue": 0.5}}]
    ids = {"traceId": "1" * 32, "spanId": "2" * 16}
    event = {"name": "gen_ai.evaluation.result", "attributes": score}
    record = {**ids, "eventName": "gen_ai.evaluation.result", "attributes": score}
    spans = [{**ids, "events": [{**event, "timeUnixNano": one}]} for one in (time, "7")]
    records = [{**record, "timeUnixNano": one} for one in (time, "7")]
    for decode, document in (
        (decode_traces, {"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}),
        (decode_logs, {"resourceLogs": [{"scopeLogs": [{"logRecords": records}]}]}),
    ):
        rows = decode(json.dumps(document).encode(), json=True, sender=SENDER, rewards_granted=True)
        assert (len(rows.rewards), rows.rejected) == (1, 1)
        assert "time outside of 64-bit nanoseconds" in rows.message


def test_an_id_with_spaces_is_no_hex_and_the_other_spans_stay() -> None:
    ids = {"traceId": "1" * 32, "spanId": "2" * 16}
    bad = [{**ids, "traceId": " " * 32}, {**ids, "spanId": "ab " * 5 + " "}]
    spans = {"resourceSpans": [{"scopeSpans": [{"spans": [*bad, ids]}]}]}
    rows = decode_traces(json.dumps(spans).encode(), json=True, sender=SENDER, rewards_granted=True)
    assert (len(rows.spans), rows.rejected) == (1, 2)


def test_attributes_are_truncated_with_a_mark() -> None:
    kept = json.loads(row(wire(a="x" * 50, b=[1] * 50, c=1, d=2), Limits(3, 10)).attributes)
    assert kept == {"a": "x" * 10, "b": "[1,1,1,1,1", "c": 1, "leyden.truncated": True}
    assert json.loads(row(wire(a=float("nan"), b=True)).attributes) == {"a": None, "b": True}


@pytest.mark.parametrize(
    "changes",
    [
        {"trace_id": "00" * 16},
        {"trace_id": "ab"},
        {"span_id": ""},
        {"start_ns": 2**63},
        {"end_ns": -1},
        {"events": [WireEvent("any", {}, 2**63)]},
    ],
)
def test_invalid_spans_are_rejected(changes: dict[str, Any]) -> None:
    span = wire()
    for name, value in changes.items():
        setattr(span, name, value)
    with pytest.raises(SpanRejected):
        row(span)
