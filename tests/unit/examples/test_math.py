"""The math agent's calculator and teacher, and its runs with and without intermediate rewards."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import pytest

from leyden.libs.contracts.config import Component, RunConfig
from leyden.libs.grading.facts import AttemptFacts
from leyden.libs.grading.grade import grade
from tests.campaigns.experiments.choices import Choices
from tests.campaigns.experiments.math import MATH
from tests.support.examples import example_modules

QUESTION = "How many legs have 4 humans and 5 wasps?"
TASK = {"question": QUESTION, "answer": "38", "steps": ["4 * 2", "8 + 5 * 6"]}


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> list[ModuleType]:
    return example_modules(monkeypatch, MATH.agent, "calculator", "equations", "teacher")


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("46 - 75 - 38", "-67"),
        ("2 * (3 + 4) / 4", "3.5"),
        ("0.1 + 0.2", "0.3"),
        ("-1 / 3", "-0.3333333333"),
        ("1 / 0", "Error: Fraction(1, 0)"),
        ("4 - 1 =", "Error: no expression of numbers"),
        ("2 ** 9", "Error: no expression of numbers"),
        ("True + 1", "Error: no expression of numbers"),
        ("__import__('os')", "Error: no expression of numbers"),
        ("1 + " * 60 + "1", "Error: the expression is too long"),
    ],
)
def test_the_calculator_is_exact_and_runs_no_code(modules: list[ModuleType], expression: str, result: str) -> None:
    assert modules[0].calculate(expression) == result


@pytest.mark.parametrize("expression", ["1e999", "1e300 * " * 20 + "1e300", "1e300 * " * 20 + "1e300 / 3"])
def test_numbers_beyond_all_bounds_are_errors(modules: list[ModuleType], expression: str) -> None:
    assert modules[0].calculate(expression).startswith("Error: ")


def test_a_solution_in_words_gives_the_steps_up_to_its_answer(modules: list[ModuleType]) -> None:
    equations = modules[1].equations
    words = "He buys 2 x €3 = €6 of nails, 30 days/month.\nSo he has $10 - $6 = $4 left.\n5 + 5 = 10"
    assert equations(words, "4") == ["2 * 3", "10 - 6"]
    assert equations(words, "7") == []
    assert equations("2 + 2 = 5", "5") == []


def test_the_teacher_calculates_each_step_and_its_answer_is_graded_right(modules: list[ModuleType]) -> None:
    teacher = modules[2]
    messages: list[dict[str, Any]] = [{"role": "system", "content": "-"}, {"role": "user", "content": QUESTION}]
    called = []
    while "tool_calls" in (said := teacher.solution({QUESTION: TASK}, messages)):
        called.append(json.loads(said["tool_calls"][0]["function"]["arguments"])["expression"])
        messages += [said, {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "-"}]
    assert called == TASK["steps"]
    component = Component.model_validate(MATH.document(0, Choices())["reward"]["components"][0])
    assert grade(component, AttemptFacts(TASK, json.dumps({"answer": said["content"]}))).value == 1.0
    assert grade(component, AttemptFacts(TASK, '{"answer": ""}')).value == 0.0
    assert teacher.solution({QUESTION: TASK}, [{"role": "user", "content": "Another?"}])["content"] == ""


@pytest.mark.parametrize("level", MATH.levels)
def test_sparse_rewards_and_levels_change_the_training_alone(level: str) -> None:
    dense, sparse = Choices(level=level), Choices(level=level, air="sparse")
    documents = [RunConfig.model_validate(MATH.document(0, one)) for one in (dense, sparse)]
    assert [one.credit.air is None for one in documents] == [False, True]
    assert {one.dataset for one in documents} == {f"math-{level}-0"}
    # Both compare the same warm start.
    assert MATH.demonstrations(0, dense) == MATH.demonstrations(0, sparse)
    assert MATH.warm_start(0, dense, "run-a") == MATH.warm_start(0, sparse, "run-a")
    assert MATH.page(dense) != MATH.page(sparse)
