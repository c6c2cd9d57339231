import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from leyden.libs.contracts.config import Air
from leyden.libs.contracts.states import OutcomeKind
from leyden.services.credit.air import ToolUse, air_reward, tool_uses
from leyden.services.credit.joins import without_duplicates
from leyden.services.credit.records import AskedTool, Call, ToolResult, ToolSpan
from tests.unit.credit.cases import asking, call, span


def test_status_earns_the_tools_weight() -> None:
    air = Air(weights={"memory": 0.3, "search": 0.2}, failure=-0.5)
    uses = [ToolUse("memory", "ok", "time"), ToolUse("search", "error", "time"), ToolUse("new", "ok", "time")]
    # 0.3 - 0.5 · 0.2; a tool without a weight and a status that nobody knows earn nothing.
    assert air_reward([*uses, ToolUse("search", "unset", "answer")], air) == pytest.approx(0.2)
    assert air_reward(uses, Air()) == 0.0


def test_the_reward_of_a_call_is_bounded() -> None:
    uses = [ToolUse("search", "ok", "time")] * 3
    assert air_reward(uses, Air(weights={"search": 0.5})) == 1.0
    assert air_reward(uses, Air(weights={"search": -5.0})) == -1.0


def test_tool_call_id_has_precedence_over_response_id_and_time() -> None:
    first = asking("first", [1], [2], "search", at=0)
    second = asking("second", [1, 2], [3], "search", at=10)
    by_id = span("search", "error", at=12, tool_call_id=first.asked[0].tool_call_id, response_id=f"resp_{second.id}")
    by_response = span("search", at=1, response_id=f"resp_{second.id}")
    uses = tool_uses([first, second], [by_id, by_response])
    assert uses[first.id] == [ToolUse("search", "error", "tool_call_id")]
    assert uses[second.id] == [ToolUse("search", "ok", "response_id")]


def test_ids_of_other_gateways_fall_back_to_time() -> None:
    calls = [asking("a", [1], [2], "search", at=0), asking("b", [1, 2], [3], "memory", at=10)]
    spans = [
        span("search", at=5, tool_call_id="toolu_unknown", response_id="resp_unknown"),
        span("memory", at=11),
        span("search", at=-1),
    ]
    uses = tool_uses(calls, spans)
    assert uses == {calls[0].id: [ToolUse("search", "ok", "time")], calls[1].id: [ToolUse("memory", "ok", "time")]}


def test_a_tool_call_has_one_result_and_unasked_tools_have_none() -> None:
    asked = asking("asked", [1], [2], "search", "memory", at=0)
    other = call("other", [9], [2], at=1)
    ids = [one.tool_call_id for one in asked.asked]
    # The agent's name for the tool of an id does not count: the model asked for a memory.
    spans = [span("search", at=2 + k) for k in range(5)]
    spans += [span("search", "error", at=8 + k, tool_call_id=ids[1]) for k in range(5)]
    spans += [span("search", at=20 + k, response_id=f"chatcmpl-{other.id}") for k in range(5)]
    assert tool_uses([asked, other], spans) == {
        asked.id: [ToolUse("search", "ok", "time"), ToolUse("memory", "error", "tool_call_id")]
    }


def test_an_answer_without_tool_calls_requests_each_named_tool_once() -> None:
    calls = [call("a", [1], [2], at=0, text="Memory: what about research?"), call("b", [1, 2], [3], at=5, text="Bye.")]
    spans = [span(tool, at=6 + k) for k in range(3) for tool in ("memory", "search")]
    assert tool_uses(calls, spans) == {calls[0].id: [ToolUse("memory", "ok", "text")]}


def test_a_requested_tool_without_a_span_has_an_unknown_status() -> None:
    asked = asking("asked", [1], [2], "search", "search", "memory", at=0)
    uses = tool_uses([asked], [span("search", at=1)])
    assert uses[asked.id] == [
        ToolUse("search", "ok", "time"),
        ToolUse("search", "unset", "answer"),
        ToolUse("memory", "unset", "answer"),
    ]


def test_an_error_outweighs_an_ok_for_the_same_use() -> None:
    same_id = [span("search", "ok", at=0, tool_call_id="x"), span("search", "error", at=5, tool_call_id="x")]
    assert [one.status for one in without_duplicates(same_id)] == ["error"]
    outer = span("search", "ok", at=0, seconds=2, scope="openinference")
    inner = span("search", "error", at=0.5, seconds=1, scope="autogen-core")
    assert [one.status for one in without_duplicates([inner, outer])] == ["error"]
    child = span("search", "ok", at=0.5, seconds=1, scope="openinference", parent_span_id=outer.span_id)
    assert len(without_duplicates([outer, child])) == 1


def test_parallel_uses_of_one_tool_are_not_duplicates() -> None:
    inside = [span("search", at=0, seconds=2), span("search", at=0.5, seconds=1)]
    apart = [span("search", at=0, scope="a"), span("search", at=5, scope="b")]
    different = [span("search", at=0, tool_call_id="x"), span("search", at=0, scope="b", tool_call_id="y")]
    assert [len(without_duplicates(spans)) for spans in (inside, apart, different)] == [2, 2, 2]


def without_spans(calls: list[Call], ending: OutcomeKind, seen: list[Call] | None = None) -> dict[str, list[ToolUse]]:
    return tool_uses(calls, [], seen, ending)


def test_a_tool_call_without_a_span_takes_its_status_from_its_result() -> None:
    first = asking("first", [1], [2], "search", "memory", "clock", "search", at=0)
    ids = [one.tool_call_id for one in first.asked]
    results = (
        ToolResult(ids[1], "Error: no memory"),
        ToolResult(ids[2], "null"),
        ToolResult(ids[0], "found"),
        ToolResult(ids[3], "found", is_error=True),
    )
    # The later call that has them was aborted before its first token, and is in no tree.
    seen = [first, call("second", [1, 2, 3], [], at=5, completed=False, results=results)]
    by_span = span("search", "error", at=1, tool_call_id=ids[0])
    assert tool_uses([first], [by_span], seen, OutcomeKind.SUCCEEDED) == {
        first.id: [
            ToolUse("search", "error", "tool_call_id"),
            ToolUse("memory", "error", "result"),
            ToolUse("clock", "error", "result"),
            ToolUse("search", "error", "result"),
        ]
    }
    assert {use.source for use in tool_uses([first], [], seen)[first.id]} == {"answer"}


def test_results_without_ids_are_for_the_tool_calls_before_them_in_order() -> None:
    first = asking("first", [1], [2], "search", "memory", at=0)
    results = (ToolResult(None, '{"hits": 3}'), ToolResult(None, "Error: no memory"))
    calls = [first, call("second", [1, 2, 3], [4], at=5, results=results)]
    assert without_spans(calls, OutcomeKind.SUCCEEDED)[first.id] == [
        ToolUse("search", "ok", "result"),
        ToolUse("memory", "error", "result"),
    ]


def test_a_result_in_a_users_text_is_for_the_call_before() -> None:
    first = asking("first", [1], [2], "search", at=0)
    second = asking("second", [3], [4], "memory", at=5)
    second = replace(second, results=(ToolResult(None, "Observation:\n3 hits"),))
    third = call("third", [5], [6], at=9, results=(ToolResult(None, "Error:\nno memory"),))
    assert without_spans([first, second, third], OutcomeKind.TIMEOUT) == {
        first.id: [ToolUse("search", "ok", "result")],
        second.id: [ToolUse("memory", "error", "result")],
    }


def test_a_tool_call_that_never_got_a_result_is_hung_lost_or_unknown() -> None:
    broken = asking("broken", [7], [8], at=0)
    broken = replace(broken, asked=(AskedTool("memory", "call_1", is_malformed=True),))
    calls = [asking(name, [at], [2], "search", at=at) for at, name in enumerate("ab", 1)]

    def found(kind: OutcomeKind) -> list[tuple[str, str]]:
        uses = without_spans([broken, *calls], kind)
        return [(str(use.status), use.source) for one in uses.values() for use in one]

    first = ("error", "malformed")
    assert found(OutcomeKind.TIMEOUT) == [first, ("unset", "answer"), ("error", "hung")]
    assert found(OutcomeKind.AGENT_ERROR) == [first, ("unset", "answer"), ("error", "lost")]
    assert found(OutcomeKind.SUCCEEDED) == [first, ("unset", "answer"), ("unset", "answer")]


def test_a_span_that_never_ended_is_a_tool_that_hangs() -> None:
    asked = asking("asked", [1], [2], "search", at=1)
    unended = replace(span("search", at=2, tool_call_id=asked.asked[0].tool_call_id), end_ns=0)
    assert tool_uses([asked], [unended]) == {asked.id: [ToolUse("search", "error", "hung")]}
    ended = replace(unended, span_id="b", end_ns=unended.start_ns + 1)
    assert tool_uses([asked], [unended, ended]) == {asked.id: [ToolUse("search", "ok", "tool_call_id")]}


def lines_of(work: Callable[[], object]) -> int:
    """The lines of Python that a call executes: its work, whatever the machine does."""
    count = 0

    def trace(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


Flood = Callable[[int, Sequence[Call]], ToolSpan]
FLOODS: dict[str, Flood] = {
    "one after the other": lambda n, _: span("a", at=n, seconds=0.5, span_id=f"{n:016x}"),
    "all at once": lambda n, _: span("a", at=n / 1e6, seconds=1e6, span_id=f"{n:016x}"),
    "each inside the one before": lambda n, _: span("a", at=n, seconds=1e6 - 2 * n, span_id=f"{n:016x}"),
    "of as many libraries": lambda n, _: span("a", at=n / 1e6, seconds=1e6, span_id=f"{n:016x}", scope=str(n)),
    "of as many tools": lambda n, _: span(f"t{n}", at=n, span_id=f"{n:016x}"),
    "of one tool call": lambda n, calls: span(
        "a", at=n, span_id=f"{n:016x}", tool_call_id=calls[-1].asked[0].tool_call_id
    ),
    "of one answer": lambda n, calls: span("a", at=n, span_id=f"{n:016x}", response_id=f"x-{calls[-1].id}"),
    "before all calls": lambda n, _: span("a", at=-n, seconds=0.5, span_id=f"{n:016x}"),
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS.keys())
def test_the_work_grows_with_the_spans_and_the_calls_and_not_with_their_product(flood: Flood) -> None:
    def work(count: int) -> int:
        calls = [asking(f"c{n}", [1], [2], "a", "b", at=n * 10) for n in range(count // 10)]
        spans = [flood(n, calls) for n in range(count)]
        return lines_of(lambda: tool_uses(calls, spans))

    small, large = work(500), work(2000)
    assert large < 4.5 * small


def test_texts_are_searched_for_a_bounded_number_of_tools() -> None:
    answers = [call(f"c{n}", [1], [2], at=n, text="use t1 or t2999") for n in range(20)]
    spans = [span(f"t{n}", at=100 + n, span_id=f"{n:016x}") for n in range(3000)]
    assert {use.tool for uses in tool_uses(answers, spans).values() for use in uses} == {"t1"}


@pytest.mark.parametrize(
    ("received_at", "arrived", "expected"),
    [
        (10, 10 + 2 * 10**9, ("ok", "result")),
        (10, 11 + 2 * 10**9, ("error", "hung")),
        # Nobody knows when the agent had the answer, or the result.
        (None, 11 + 2 * 10**9, ("ok", "result")),
        (10, None, ("ok", "result")),
    ],
)
def test_a_tool_that_takes_longer_than_the_limit_hangs(
    received_at: int | None, arrived: int | None, expected: tuple[str, str]
) -> None:
    asked = replace(asking("a", [1], [2], "search", at=0), received_at=received_at)
    result = ToolResult(asked.asked[0].tool_call_id, "7", arrived=arrived)
    answer = replace(call("b", [1, 2, 3], [4], at=1), results=(result,))
    for limit, found in ((2.0, expected), (None, ("ok", "result"))):
        uses = tool_uses([asked, answer], [], [asked, answer], OutcomeKind.SUCCEEDED, Air(tool_seconds=limit))
        assert uses == {asked.id: [ToolUse("search", *found)]}


def test_of_two_tools_at_once_nothing_tells_which_one_hangs() -> None:
    asked = replace(asking("a", [1], [2], "search", "add", at=0), received_at=0)
    results = tuple(ToolResult(one.tool_call_id, "7", arrived=10**12) for one in asked.asked)
    answer = replace(call("b", [1, 2, 3], [4], at=1), results=results)
    air = Air(tool_seconds=2.0)
    uses = tool_uses([asked, answer], [], [asked, answer], OutcomeKind.SUCCEEDED, air)
    assert {use.source for use in uses[asked.id]} == {"result"}
    # Their spans do.
    spans = [span("search", at=0.1, seconds=1.5), span("add", at=0.1, seconds=2.5, span_id="b" * 16)]
    uses = tool_uses([asked, answer], spans, [asked, answer], OutcomeKind.SUCCEEDED, air)
    assert {use.tool: (use.status, use.source) for use in uses[asked.id]} == {
        "search": ("ok", "time"),
        "add": ("error", "hung"),
    }


@pytest.mark.parametrize(
    ("null", "expected"),
    [("failure", ("error", "result")), ("nothing", ("unset", "result")), ("success", ("ok", "result"))],
)
@pytest.mark.parametrize("spans", [[], [span("search", at=0.5)]])
def test_an_empty_result_means_the_same_with_and_without_a_span(
    null: Any, expected: tuple[str, str], spans: list[ToolSpan]
) -> None:
    asked = asking("a", [1], [2], "search", at=0)
    answer = replace(call("b", [1, 2, 3], [4], at=1), results=(ToolResult(asked.asked[0].tool_call_id, "null"),))
    uses = tool_uses([asked, answer], spans, [asked, answer], OutcomeKind.SUCCEEDED, Air(null=null))
    assert uses == {asked.id: [ToolUse("search", *expected)]}


def test_a_result_marked_as_an_error_counts_more_than_a_span_without_one() -> None:
    asked = asking("a", [1], [2], "search", at=0)
    named = asked.asked[0].tool_call_id
    answer = replace(call("b", [1, 2, 3], [4], at=1), results=(ToolResult(named, "no such file", is_error=True),))
    both = [asked, answer]
    found = tool_uses(both, [span("search", at=0.5, tool_call_id=named)], both, OutcomeKind.SUCCEEDED)
    assert found == {asked.id: [ToolUse("search", "error", "result")]}


def test_a_spans_error_counts_more_than_an_empty_result_and_the_runs_rules_more() -> None:
    asked = asking("a", [1], [2], "search", at=0)
    answer = replace(call("b", [1, 2, 3], [4], at=1), results=(ToolResult(asked.asked[0].tool_call_id, "null"),))
    failed = [span("search", "error", at=0.5)]
    both = [asked, answer]
    found = tool_uses(both, failed, both, OutcomeKind.SUCCEEDED, Air(null="success"))
    assert found == {asked.id: [ToolUse("search", "error", "time")]}
    found = tool_uses(both, failed, both, OutcomeKind.SUCCEEDED, Air(null="success", failures={"search": []}))
    assert found == {asked.id: [ToolUse("search", "ok", "result")]}
