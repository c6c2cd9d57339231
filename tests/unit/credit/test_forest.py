"""The forest of calls: parents by exact tokens, and which calls the agent used."""

import random
from dataclasses import replace

import numpy as np
import pytest

from leyden.services.credit.forest import Forest, call_forest, path_to
from leyden.services.credit.records import Call
from tests.unit.credit.cases import call, chain


def parents(forest: Forest) -> list[tuple[int, int]]:
    """Per node: the number of its parent (-1 for a root) and its depth."""
    numbers = {node.call.id: number for number, node in enumerate(forest.nodes)}
    return [(numbers[node.parent.call.id] if node.parent else -1, node.depth) for node in forest.nodes]


def plain_parent(one: Call, before: list[Call]) -> str | None:
    """The call whose tokens are the longest beginning of a prompt; the latest of equals."""
    found = [
        other for other in before if other.policy == one.policy and one.prompt.startswith(other.prompt + other.sampled)
    ]
    return max(found, key=lambda other: (len(other.prompt + other.sampled), other.order)).id if found else None


@pytest.mark.parametrize("seed", range(20))
def test_the_parents_of_random_calls_are_those_of_a_plain_search(seed: int) -> None:
    choose = random.Random(seed)
    calls = list[Call]()
    for number in range(60):
        before = choose.choice(calls) if calls and choose.random() < 0.8 else None
        tokens = [] if before is None else np.frombuffer(before.prompt + before.sampled, np.int32).tolist()
        prompt = tokens[: choose.randint(1, len(tokens) + 1)] + choose.choices((1, 2), k=choose.randint(1, 3))
        one = call(f"c{number}", prompt, choose.choices((1, 2), k=choose.randint(1, 3)), at=number)
        calls.append(replace(one, policy=choose.choice((None, "other"))))
    forest = call_forest(calls)
    found = [node.parent.call.id if node.parent else None for node in forest.nodes]
    assert found == [plain_parent(one, calls[:number]) for number, one in enumerate(calls)]
    assert [[child.call.id for child in node.children] for node in forest.nodes] == [
        [child.call.id for child in forest.nodes if child.parent is node] for node in forest.nodes
    ]


def test_a_conversation_is_a_chain() -> None:
    forest = call_forest(chain("a", 4))
    assert parents(forest) == [(-1, 0), (0, 1), (1, 2), (2, 3)]
    assert [node.call.id for node in path_to(forest.leaves[0])] == [node.call.id for node in forest.nodes]


def test_the_longest_beginning_is_the_parent() -> None:
    first = call("first", [1], [2], at=0)
    second = call("second", [1, 2, 3], [4], at=1)
    third = call("third", [1, 2, 3, 4, 5], [6], at=2)
    branch = call("branch", [1, 2, 9], [6], at=3)
    assert parents(call_forest([third, branch, second, first])) == [(-1, 0), (0, 1), (1, 2), (0, 1)]


def test_a_rewritten_history_is_a_root() -> None:
    forest = call_forest([call("a", [1], [2, 3], at=0), call("b", [1, 2, 7], [4], at=1)])
    assert parents(forest) == [(-1, 0), (-1, 0)]
    assert len(forest.roots) == 2


def test_a_prompt_equal_to_a_complete_call_continues_it() -> None:
    assert parents(call_forest([call("a", [1], [2], at=0), call("b", [1, 2], [3], at=1)])) == [(-1, 0), (0, 1)]


def test_choices_of_one_request_are_siblings_and_the_continued_one_is_the_parent() -> None:
    choices = [call(f"n{k}", [1], [5 + k], at=0, choice=k) for k in range(3)]
    assert parents(call_forest([*choices, call("next", [1, 6, 2], [9], at=1)])) == [(-1, 0)] * 3 + [(1, 1)]


def test_cut_short_calls_remain_only_where_a_completed_call_continues_them() -> None:
    dropped = call("dropped", [1], [5], at=0, completed=False)
    kept = call("kept", [1], [6], at=1, completed=False)
    after = call("after", [1, 6, 2], [7], at=2)
    empty = call("empty", [1, 6], [], at=3, completed=False)
    forest = call_forest([dropped, kept, after, empty])
    assert [node.call.id for node in forest.nodes] == [kept.id, after.id]
    assert parents(forest) == [(-1, 0), (0, 1)]


def test_no_calls_make_an_empty_forest() -> None:
    assert (call_forest([]).nodes, call_forest([]).leaves) == ([], [])


def names(forest: Forest) -> list[str]:
    return [node.call.id for node in forest.nodes]


def test_an_answer_that_nobody_received_is_no_call_of_the_agent() -> None:
    lost = call("lost", [1], [5], at=0, delivered=False)
    kept = call("kept", [1, 3], [6], at=1, delivered=True)
    unknown = call("unknown", [1, 3, 6, 2], [7], at=2)
    assert names(call_forest([lost, kept, unknown])) == [kept.id, unknown.id]


def test_an_answer_that_a_later_call_continues_was_received() -> None:
    # Its client closed the connection after the text and before the end of the stream.
    cut = call("cut", [1], [5], at=0, delivered=False)
    after = call("after", [1, 5, 2], [7], at=1)
    assert names(call_forest([cut, after])) == [cut.id, after.id]


def test_an_answer_that_only_lost_calls_continue_was_not_received() -> None:
    first = call("first", [1], [5], at=0, delivered=False)
    second = call("second", [1, 5, 2], [7], at=1, delivered=False)
    assert names(call_forest([first, second])) == []


def test_a_repeat_that_is_continued_replaces_the_equal_requests_before_it() -> None:
    first, second, third = (call(f"v{n}", [1], [5 + n], at=n, request_sha256=b"same") for n in range(3))
    after = call("after", [1, 6, 2], [9], at=4, request_sha256=b"other")
    assert names(call_forest([first, second, third, after])) == [second.id, third.id, after.id]


@pytest.mark.parametrize(("delivered", "kept"), [(None, ["again"]), (True, ["first", "again"])])
def test_an_answer_of_unknown_delivery_was_not_received_where_its_request_was_answered_again(
    delivered: bool | None, kept: list[str]
) -> None:
    """As after the death of a gateway, whose client tried again at another one."""
    first = call("first", [1], [5], at=0, seconds=2.0, request_sha256=b"same", delivered=delivered)
    again = call("again", [1], [6], at=1, request_sha256=b"same", delivered=True)
    assert names(call_forest([first, again])) == [{"first": first.id, "again": again.id}[name] for name in kept]


def test_equal_requests_at_one_time_stay_though_one_of_them_is_continued() -> None:
    """As an agent that samples several answers side by side and goes on with the best."""
    votes = [call(f"v{n}", [1], [5 + n], at=n / 10, seconds=2.0, request_sha256=b"same") for n in range(3)]
    after = call("after", [1, 6, 2], [9], at=4, request_sha256=b"other")
    assert names(call_forest([*votes, after])) == [*(vote.id for vote in votes), after.id]


def test_equal_requests_stay_where_nobody_continues_a_later_one() -> None:
    votes = [call(f"v{n}", [1], [5 + n], at=n, request_sha256=b"same") for n in range(3)]
    assert names(call_forest(votes)) == [vote.id for vote in votes]
