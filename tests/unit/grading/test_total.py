"""The total of a rollout's components."""

from __future__ import annotations

from typing import Any

import pytest

from leyden.libs.contracts.config import Reward
from leyden.libs.contracts.states import ComponentState
from leyden.libs.grading.grade import Grade
from leyden.libs.grading.total import Total, total

NOT_APPLICABLE = Grade(ComponentState.NOT_APPLICABLE, explanation="task.answer: missing")
FAILED = Grade(ComponentState.FAILED, explanation="it took longer than 10 s")


def scored(value: float) -> Grade:
    return Grade(ComponentState.SCORED, value)


def reward(*weights: float, **rest: Any) -> Reward:
    components = [{"name": f"c{n}", "weight": weight, "grader": {"type": "length"}} for n, weight in enumerate(weights)]
    return Reward.model_validate({"components": components, **rest})


def totalled(of: Reward, *grades: Grade) -> Total:
    return total(of, {f"c{n}": one for n, one in enumerate(grades)})


def test_the_total_is_the_weighted_sum() -> None:
    # R = 0.9 · F1 + 0.1 · format, as in the Agent Lightning paper's retrieval agent.
    assert totalled(reward(0.9, 0.1), scored(0.5), scored(1.0)).value == pytest.approx(0.55, abs=1e-9)


def test_what_is_not_applicable_adds_nothing() -> None:
    assert totalled(reward(0.9, 0.1), NOT_APPLICABLE, scored(1.0)) == Total(0.1)


def test_without_any_applicable_component_there_is_no_total() -> None:
    assert totalled(reward(1.0), NOT_APPLICABLE) == Total(None, "c0: task.answer: missing")


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ("exclude", Total(None, "c0: it took longer than 10 s")),
        ("zero", Total(0.25)),
        ("renormalise", Total(1.0)),
    ],
)
def test_a_failed_component_follows_missing(missing: str, expected: Total) -> None:
    assert totalled(reward(0.75, 0.25, missing=missing), FAILED, scored(1.0)) == expected


def test_a_failed_component_is_no_0_when_nothing_else_counts() -> None:
    assert totalled(reward(1.0, missing="renormalise"), FAILED).value is None
    assert totalled(reward(1.0, missing="zero"), FAILED).value == 0.0


def test_a_metric_of_weight_0_earns_nothing_and_excludes_nothing() -> None:
    assert totalled(reward(1.0, 0.0), scored(0.5), FAILED) == Total(0.5)
    assert totalled(reward(1.0, 0.0), scored(0.5), scored(9.0)) == Total(0.5)
