"""The pool of graders' processes: hangs, crashes, errors and cancellations end no other grading."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from leyden.libs.contracts.config import Component
from leyden.libs.contracts.states import ComponentState
from leyden.libs.grading.facts import AttemptFacts
from leyden.libs.grading.pool import Pool

WORDS = {"type": "length", "at_most": 3}
HANGS = {"type": "regex", "pattern": "^(a+)+$"}
BAIT = AttemptFacts({"answer": "x"}, "a" * 64 + "!")


def components(*graders: dict[str, Any]) -> list[Component]:
    return [Component.model_validate({"name": f"c{n}", "grader": one}) for n, one in enumerate(graders)]


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    opened = Pool(1, component_seconds=1.0)
    yield opened
    await opened.close()


# Each of the 40 terms is one instruction of SQLite, during which nothing looks at the clock.
SLOW_TERM = "length(trim('{i}' || hex(zeroblob(49990)), replace(hex(zeroblob(4000)), '0', 'z') || '0{i}'))"
SLOW_SQL = "SELECT " + ", ".join(SLOW_TERM.format(i=i) for i in range(40))
SQL = {"type": "sql_result", "reference": "{task.sql}", "database": "CREATE TABLE t(a);"}


async def test_a_text_whose_search_never_ends_earns_0_alone(pool: Pool) -> None:
    first, hung, last = await pool.grade(components(WORDS, HANGS, WORDS), BAIT)
    assert (first.grade.value, last.grade.value, first.crashed) == (1.0, 1.0, False)
    assert (hung.grade.state, hung.grade.value, hung.crashed) == (ComponentState.SCORED, 0.0, False)
    assert hung.grade.explanation == "the grading of this output took longer than 1 s: it counts as 0, the worst"


@pytest.mark.parametrize(
    ("changes", "worst"),
    [({"weight": -0.5}, 1.0), ({"weight": -0.5, "gate": {"at_least": 1}}, 0.0), ({"weight": 0}, 0.0)],
)
async def test_a_text_whose_search_never_ends_is_no_way_out_of_a_penalty(
    pool: Pool, changes: dict[str, Any], worst: float
) -> None:
    penalty = Component.model_validate({"name": "rude", "grader": HANGS, **changes})
    [hung] = await pool.grade([penalty], BAIT)
    assert (hung.grade.state, hung.grade.value) == (ComponentState.SCORED, worst)
    assert hung.grade.explanation.endswith(f"it counts as {worst:g}, the worst")


@pytest.mark.parametrize(("weight", "worst"), [(1.0, 0.0), (-1.0, 1.0)])
@pytest.mark.parametrize(
    ("grader", "task", "output"),
    [
        (SQL, {"sql": "SELECT 1"}, SLOW_SQL),
        (
            {"type": "json_path", "path": "$.items[*]", "reference": "{task.answers}"},
            {"answers": [str(n) for n in range(10, 1010)]},
            '{"items": [' + ",".join(["1"] * 490_000) + "]}",
        ),
        (
            {"type": "text_similarity", "measure": "fuzzy", "reference": "{task.answers}"},
            {"answers": ["ab" * 25_000] * 20},
            "ba" * 25_000,
        ),
    ],
)
async def test_no_output_escapes_its_grader_by_the_time_that_it_takes(
    pool: Pool, grader: dict[str, Any], task: dict[str, Any], output: str, weight: float, worst: float
) -> None:
    slow = Component.model_validate({"name": "slow", "grader": grader, "weight": weight})
    late, last = await pool.grade([slow, *components(WORDS)], AttemptFacts(task, output))
    assert (late.grade.state, late.grade.value, late.crashed) == (ComponentState.SCORED, worst, False)
    assert last.grade.state == ComponentState.SCORED


async def test_a_component_that_takes_too_long_by_its_task_fails_alone(pool: Pool) -> None:
    facts = AttemptFacts({"sql": SLOW_SQL}, "SELECT 1")
    # The agent's part of the first component does not count for the second one.
    first, late, last = await pool.grade(components(WORDS, SQL, WORDS), facts)
    assert (late.grade.state, late.crashed) == (ComponentState.FAILED, True)
    assert late.grade.explanation == "it took longer than 1 s before it read the output"
    assert (first.grade.value, last.grade.value) == (1.0, 1.0)


async def test_an_error_of_a_grader_is_its_finding_and_no_crash(pool: Pool) -> None:
    broken = {"type": "json_schema", "json_schema": {"type": "nonsense"}}
    nameless = {"type": "numeric", "reference": "{task.answer}"}
    for found in await pool.grade(components(broken, nameless), AttemptFacts({"answer": "x"}, "{}")):
        assert (found.grade.state, found.crashed) == (ComponentState.FAILED, False)
        assert found.grade.explanation.startswith("ValueError" if "number" in found.grade.explanation else "Validation")


async def test_a_cancelled_grading_leaves_no_answer_for_the_next_one(pool: Pool) -> None:
    cancelled = asyncio.create_task(pool.grade(components(WORDS, HANGS), BAIT))
    await asyncio.sleep(0.6)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    (found,) = await pool.grade(components({**WORDS, "output": "one two three four five six"}), BAIT)
    assert found.grade.value == 0.0


async def test_gradings_beyond_the_processes_wait(pool: Pool) -> None:
    found = await asyncio.gather(*(pool.grade(components(WORDS), AttemptFacts({}, "word " * n)) for n in range(8)))
    assert [one[0].grade.explanation for one in found] == [f"{n} words" for n in range(8)]
