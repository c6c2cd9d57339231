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


def reward(*weights: float, gates: dict[int, float] | None = None, **rest: Any) -> Reward:
    bounds = {place: {"gate": {"at_least": bound}} for place, bound in (gates or {}).items()}
    components = [
        {"name": f"c{n}", "weight": weight, "grader": {"type": "length"}, **bounds.get(n, {})}
        for n, weight in enumerate(weights)
    ]
    return Reward.model_validate({"components": components, **rest})


def totalled(of: Reward, *grades: Grade) -> Total:
    return total(of, {f"c{n}": one for n, one in enumerate(grades)})


def test_the_total_is_the_weighted_sum() -> None:
    # R = 0.9 · F1 + 0.1 · format, as in the Agent Lightning paper's retrieval agent.
    found = totalled(reward(0.9, 0.1), scored(0.5), scored(1.0))
    assert found.value == pytest.approx(0.55, abs=1e-9)
    assert found.contributions == pytest.approx({"c0": 0.45, "c1": 0.1}, abs=1e-9)


def test_what_is_not_applicable_adds_nothing() -> None:
    assert totalled(reward(0.9, 0.1), NOT_APPLICABLE, scored(1.0)) == Total(0.1, None, {"c1": 0.1})


def test_without_any_applicable_component_there_is_no_total() -> None:
    assert totalled(reward(1.0), NOT_APPLICABLE) == Total(None, "c0: task.answer: missing")


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ("exclude", Total(None, "c0: it took longer than 10 s")),
        ("zero", Total(0.25, None, {"c0": 0.0, "c1": 0.25})),
        ("renormalise", Total(1.0, None, {"c1": 1.0})),
    ],
)
def test_a_failed_component_follows_missing(missing: str, expected: Total) -> None:
    assert totalled(reward(0.75, 0.25, missing=missing), FAILED, scored(1.0)) == expected


@pytest.mark.parametrize(
    ("penalty", "grades", "expected"),
    [
        (-0.2, (FAILED, scored(1.0)), -1.2),
        (-0.2, (FAILED, scored(0.0)), 0.0),
        (-1.0, (scored(1.0), FAILED), 2.0),
        (-2.0, (scored(1.0), FAILED), 3.0),
        (-2.0, (scored(0.0), FAILED), 0.0),
    ],
)
def test_renormalise_keeps_the_sign_of_each_component(
    penalty: float, grades: tuple[Grade, ...], expected: float
) -> None:
    found = totalled(reward(1.0, penalty, missing="renormalise"), *grades)
    assert found.value == pytest.approx(expected, abs=1e-9)


def test_a_failed_component_is_no_0_when_nothing_else_counts() -> None:
    assert totalled(reward(1.0, missing="renormalise"), FAILED).value is None
    assert totalled(reward(1.0, missing="zero"), FAILED).value == 0.0


def test_a_metric_of_weight_0_earns_nothing_and_excludes_nothing() -> None:
    assert totalled(reward(1.0, 0.0), scored(0.5), FAILED).value == 0.5
    assert totalled(reward(1.0, 0.0), scored(0.5), scored(9.0)).value == 0.5


@pytest.mark.parametrize(
    ("grades", "expected"),
    [
        ((scored(0.5), scored(1.0)), (3 * 0.5 + 1 * 1.0) / 4),
        ((NOT_APPLICABLE, scored(0.7)), 0.7),
        ((FAILED, scored(0.7)), 0.7),
    ],
)
def test_the_mean_is_of_the_components_with_a_value(grades: tuple[Grade, ...], expected: float) -> None:
    found = totalled(reward(3.0, 1.0, total="weighted_mean", missing="renormalise"), *grades)
    assert found.value == pytest.approx(expected, abs=1e-9)
    assert sum(found.contributions.values()) == pytest.approx(expected, abs=1e-9)


def test_a_failed_component_that_is_zero_stays_in_the_mean() -> None:
    assert totalled(reward(3.0, 1.0, total="weighted_mean", missing="zero"), FAILED, scored(1.0)).value == 0.25


@pytest.mark.parametrize(
    ("gate", "other", "expected"), [(1.0, 0.5, 1.5), (0.99, 0.5, 0.0), (0.0, -3.0, -3.0), (0.99, -3.0, -2.01)]
)
def test_a_closed_gate_takes_what_was_earned_and_forgives_no_loss(gate: float, other: float, expected: float) -> None:
    found = totalled(reward(1.0, 1.0, gates={0: 1.0}), scored(gate), scored(other))
    assert found.value == pytest.approx(expected, abs=1e-9)
    assert found.contributions == {"c0": gate, "c1": other}


def test_rounding_closes_no_gate() -> None:
    earned = 0.7 + 0.2 + 0.1
    assert earned < 1
    assert totalled(reward(1.0, gates={0: 1.0}), scored(earned)).value == earned


def test_a_gate_of_weight_0_earns_nothing_and_holds_the_total() -> None:
    gated = reward(0.0, 1.0, gates={0: 0.5})
    assert totalled(gated, scored(0.6), scored(0.8)).value == 0.8
    assert totalled(gated, scored(0.4), scored(0.8)).value == 0.0
    assert totalled(gated, NOT_APPLICABLE, scored(0.8)).value == 0.8


@pytest.mark.parametrize(("missing", "expected"), [("exclude", None), ("renormalise", None), ("zero", 0.0)])
def test_a_failed_gate_has_passed_for_nobody(missing: str, expected: float | None) -> None:
    assert totalled(reward(0.0, 1.0, gates={0: 0.5}, missing=missing), FAILED, scored(0.8)).value == expected


@pytest.mark.parametrize(("value", "expected"), [(5.0, 1.0), (-5.0, -0.5), (0.3, 0.3)])
def test_clip_bounds_the_total_and_no_contribution(value: float, expected: float) -> None:
    found = totalled(reward(2.0, clip=[-0.5, 1.0]), scored(value / 2))
    assert (found.value, found.contributions) == (expected, {"c0": value})


def test_clip_comes_after_gates() -> None:
    assert totalled(reward(1.0, gates={0: 0.5}, clip=[0.1, 1.0]), scored(0.4)).value == 0.1
