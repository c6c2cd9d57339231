from leyden.services.credit.forest import Forest, call_forest, path_to
from tests.unit.credit.cases import call, chain


def parents(forest: Forest) -> list[tuple[int, int]]:
    """Per node: the number of its parent (-1 for a root) and its depth."""
    numbers = {node.call.id: number for number, node in enumerate(forest.nodes)}
    return [(numbers[node.parent.call.id] if node.parent else -1, node.depth) for node in forest.nodes]


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
