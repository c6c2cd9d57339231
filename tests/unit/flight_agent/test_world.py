import pytest
from world import Task, ToolError, World

TASK = Task("How do I get to Rome?", "Lyon", "Rome", 120, "Iberia", "7:40", 95)


def test_search_fails_before_memory_was_read() -> None:
    world = World(TASK)
    with pytest.raises(ToolError, match="unknown place of departure") as caught:
        world.search("flight to Rome")
    assert (caught.value.kind, world.found) == ("unknown_departure", False)
    assert world.memory("where am I") == "You are in Lyon and have 120 euros."
    assert world.search("flight to Rome") == "Iberia leaves Lyon at 7:40 for 95 euros."
    assert world.found


def test_memory_has_nothing_new_the_second_time() -> None:
    world = World(TASK)
    world.memory("")
    with pytest.raises(ToolError) as caught:
        world.memory("")
    assert caught.value.kind == "nothing_new"


@pytest.mark.parametrize(
    ("query", "result"), [("40 * 1.6", "64."), ("how much is 120-95?", "25."), ("7 / 2", "3.5."), ("3 x 4", "12.")]
)
def test_calculator_computes(query: str, result: str) -> None:
    assert World(TASK).calculator(query) == result


@pytest.mark.parametrize("query", ["", "five plus two", "1 / 0"])
def test_calculator_without_an_expression_fails(query: str) -> None:
    with pytest.raises(ToolError, match="nothing to compute"):
        World(TASK).calculator(query)


def test_a_row_may_have_more_fields_than_a_task() -> None:
    assert Task.from_row({**vars(TASK), "note": "ignored"}) == TASK
