"""Baselines by hand, and against the vectors that verl 0.9.1 and a re-implementation of Trinity computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.services.credit.baselines import EPSILON, Kind, Siblings, against, gigpo, moved
from leyden.services.credit.baselines import advantages as of_siblings
from leyden.services.credit.states import START

ORACLE: dict[str, Any] = json.loads((Path(__file__).parents[1] / "trainer/oracles/rl-oracle-vectors.json").read_text())
GROUPS = {"A": [1.0, 0.0, 0.5, 0.0], "B": [1.0, 0.25]}


def advantages(kind: Kind, returns: list[float], rollouts: list[str] | None = None) -> list[float]:
    names = rollouts or [str(i) for i in range(len(returns))]
    return of_siblings(kind, Siblings.of(np.array(returns), names, {})).advantages_C.tolist()


def recorded(name: str) -> list[float]:
    """The advantage that verl computed for each row."""
    mask = np.array(ORACLE["inputs"]["mask"])
    return [row[np.flatnonzero(m)[0]] for row, m in zip(ORACLE["advantages"][name]["adv"], mask, strict=True)]


@pytest.mark.parametrize(
    ("kind", "name"),
    [("mean", "dr_grpo(mean only)"), ("mean_std", "grpo(std,eps1e-6)"), ("leave_one_out", "rloo")],
)
def test_single_turn_baselines_equal_verl(kind: Kind, name: str) -> None:
    ours = advantages(kind, GROUPS["A"]) + advantages(kind, GROUPS["B"])
    assert ours == pytest.approx(recorded(name), abs=1e-9)


def test_opo_weighs_returns_with_lengths_as_verl_does() -> None:
    lengths = np.array(ORACLE["inputs"]["mask"]).sum(axis=1).astype(int).tolist()
    ours: list[float] = []
    for rows, returns in ((slice(0, 4), GROUPS["A"]), (slice(4, 6), GROUPS["B"])):
        names = [str(i) for i in range(len(returns))]
        siblings = Siblings.of(np.array(returns), names, {}, lengths_C=lengths[rows])
        ours += of_siblings("opo", siblings).advantages_C.tolist()
    assert ours == pytest.approx(recorded("opo"), abs=1e-9)


def test_opo_counts_the_tokens_of_all_calls_and_none_of_a_rollout_without() -> None:
    # a: value 1, 2 + 4 tokens; b: value 0, 2 tokens; c made no call. Baseline 6 / 8.
    siblings = Siblings.of(np.array([1.0, 1.0, 0.0]), ["a", "a", "b"], {"c": 0.0}, lengths_C=[2, 4, 2])
    assert of_siblings("opo", siblings).advantages_C.tolist() == pytest.approx([0.25, 0.25, -0.75, -0.75])


@pytest.mark.parametrize(("kind", "suffix"), [("mean", "none"), ("mean_std", "std")])
def test_episode_plus_state_advantages_equal_gigpo(kind: Kind, suffix: str) -> None:
    runs = ORACLE["gigpo"]["runs"]
    returns: list[float] = []
    for run in runs.values():
        tail, found = 0.0, []
        for reward in reversed(run["R"]):
            tail = reward + 0.95 * tail
            found.append(tail)
        returns += found[::-1]
    rollouts = [name for name, run in runs.items() for _ in run["R"]]
    states = [state for run in runs.values() for state in run["s"]]
    totals = {name: float(sum(run["R"])) for name, run in runs.items()}
    found = gigpo(kind, Siblings.of(np.array(returns), rollouts, {}, anchors_C=states), totals, state_weight=1.0)
    # Trinity divides by 1 + ε where it divides by no standard deviation.
    ours = found.advantages_C / (1 + EPSILON if kind == "mean" else 1)
    expected = [value for name in runs for value in ORACLE["gigpo"][f"gamma.95_omega1_{suffix}"][name]]
    assert ours.tolist() == pytest.approx(expected, abs=1e-9)


def test_by_hand_with_calls_of_unequal_number() -> None:
    # Rollout a: one call, return 1. Rollout b: three calls, returns 0, 0, 0.6, so its value is 0.2.
    returns, names = [1.0, 0.0, 0.0, 0.6], ["a", "b", "b", "b"]
    assert advantages("none", returns, names) == returns
    # Mean of the values: 0.6, whatever the number of calls.
    assert advantages("mean", returns, names) == pytest.approx([0.4, -0.6, -0.6, 0.0])
    # Baselines: 0.2 for a's call, 1 for each of b's.
    assert advantages("leave_one_out", returns, names) == pytest.approx([0.8, -1.0, -1.0, -0.4])
    # std² = (0.4² + (0.6² + 0.6² + 0) / 3) / 1 = 0.16 + 0.24 = 0.4.
    std = 0.4**0.5 + EPSILON
    assert advantages("mean_std", returns, names) == pytest.approx([0.4 / std, -0.6 / std, -0.6 / std, 0.0])


def test_a_rollout_without_calls_counts_in_the_baseline() -> None:
    found = of_siblings("mean", Siblings.of(np.array([1.0]), ["a"], {"crashed": 0.0}))
    assert (found.advantages_C.tolist(), found.baselines_C.tolist()) == ([0.5, -0.5], [0.5, 0.5])


@pytest.mark.parametrize("kind", ["mean", "mean_std", "leave_one_out", "opo"])
def test_one_rollout_alone_and_equal_rollouts_have_no_advantage(kind: Kind) -> None:
    assert advantages(kind, [0.7]) == [0.0]
    assert advantages(kind, [0.7, 0.7, 0.7]) == [0.0, 0.0, 0.0]
    # Discounting makes a rollout's own calls differ; equal rollouts still teach nothing about each other.
    assert advantages(kind, [0.9, 1.0, 0.9, 1.0], ["a", "a", "b", "b"]) == [0.0] * 4


def test_states_are_compared_among_themselves() -> None:
    # In state s: 1 and 0, mean 0.5; in state t one rollout alone; in u: a twice (mean 0.5) and b once.
    siblings = Siblings.of(
        np.array([1.0, 0.0, 5.0, 0.0, 1.0, 0.1]),
        ["a", "b", "a", "a", "a", "b"],
        {},
        anchors_C=["s", "s", "t", "u", "u", "u"],
    )
    found = of_siblings("mean", siblings)
    assert found.advantages_C.tolist() == pytest.approx([0.5, -0.5, 0.0, -0.3, 0.7, -0.2])
    assert found.baselines_C.tolist() == pytest.approx([0.5, 0.5, 5.0, 0.3, 0.3, 0.3])


def test_siblings_that_ended_before_their_first_call_count_in_the_first_state() -> None:
    # Two solved, two crashed: mean 0.5 among the first calls; the second calls have nobody to compare with but another.
    returns, owners, states = np.array([1.0, 0.9, 1.0, 0.9]), ["a", "a", "b", "b"], ["", "search:ok"] * 2
    found = of_siblings("mean", Siblings.of(returns, owners, {"c": 0.0, "d": 0.0}, anchors_C=states))
    assert found.advantages_C.tolist() == pytest.approx([0.5, 0.0, 0.5, 0.0, -0.5, -0.5])


@pytest.mark.parametrize("kind", ["mean", "mean_std", "leave_one_out", "opo"])
@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e6])
def test_rounding_is_no_variance_and_a_difference_is_at_every_scale(kind: Kind, scale: float) -> None:
    third = scale / 3
    rounded = [third, third * (1 + 1e-15), np.nextafter(third, 0), third]
    assert advantages(kind, rounded) == [0.0] * 4
    assert advantages(kind, [third, third * 1.001])[1] > 0


@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(1, 6)), min_size=2, max_size=8))
def test_splitting_a_rollout_into_more_calls_moves_nobodys_advantage(rollouts: list[tuple[float, int]]) -> None:
    values = [value for value, _ in rollouts]
    names = [str(i) for i, (_, count) in enumerate(rollouts) for _ in range(count)]
    returns = [value for value, count in rollouts for _ in range(count)]
    once = advantages("mean_std", values)
    for name, advantage in zip(names, advantages("mean_std", returns, names), strict=True):
        assert advantage == pytest.approx(once[int(name)], rel=1e-6, abs=1e-6)


@given(st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=5), min_size=2, max_size=8))
def test_advantages_average_to_zero_over_rollouts(returns: list[list[float]]) -> None:
    names = [str(i) for i, calls in enumerate(returns) for _ in calls]
    found = np.array(advantages("mean", [g for calls in returns for g in calls], names))
    means = [found[[n == str(i) for n in names]].mean() for i in range(len(returns))]
    assert np.mean(means) == pytest.approx(0, abs=1e-9)


def test_a_spread_below_the_threshold_is_no_variance() -> None:
    siblings = Siblings.of(np.array([1.0, 0.9]), ["a", "b"], {})
    assert of_siblings("mean", siblings, min_spread=0.11).advantages_C.tolist() == [0.0, 0.0]
    assert of_siblings("mean", siblings, min_spread=0.09).advantages_C.tolist() == pytest.approx([0.05, -0.05])


def test_the_moving_average_of_earlier_groups_by_hand() -> None:
    # Groups of one with returns 1, 0, 0; decay 0.9. The first has nothing to compare with: baseline 1, advantage 0.
    averages, found = dict[str, float](), []
    for value in (1.0, 0.0, 0.0):
        result = against(averages, Siblings.of(np.array([value]), ["a"], {}))
        found.append((float(result.baselines_C[0]), float(result.advantages_C[0])))
        averages[START] = moved(0.9, value, found[-1][0])
    assert found == [(1.0, 0.0), (pytest.approx(1.0), pytest.approx(-1.0)), (pytest.approx(0.9), pytest.approx(-0.9))]


Group = st.lists(st.tuples(st.floats(-10, 10), st.integers(1, 50), st.integers(1, 4)), min_size=2, max_size=8).filter(
    lambda group: np.ptp([value for value, _, _ in group]) > 1e-3
)
KINDS: list[Kind] = ["mean", "mean_std", "leave_one_out", "opo"]


def of_group(kind: Kind, group: list[tuple[float, int, int]], scale: float = 1.0, shift: float = 0.0) -> list[float]:
    """The advantage of each rollout (return, tokens, calls), its tokens spread over its calls."""
    calls = [(str(i), scale * value + shift, tokens) for i, (value, tokens, n) in enumerate(group) for _ in range(n)]
    siblings = Siblings.of(
        np.array([value for _, value, _ in calls]), [name for name, _, _ in calls], {}, lengths_C=[t for *_, t in calls]
    )
    found = of_siblings(kind, siblings).advantages_C
    return [float(found[[name for name, _, _ in calls].index(str(i))]) for i in range(len(group))]


@pytest.mark.parametrize("kind", KINDS)
@given(group=Group, shift=st.floats(-5, 5), scale=st.floats(0.1, 10))
def test_a_shift_changes_no_advantage_and_a_scale_scales_it(
    kind: Kind, group: list[tuple[float, int, int]], shift: float, scale: float
) -> None:
    factor = 1.0 if kind == "mean_std" else scale
    expected = [factor * value for value in of_group(kind, group)]
    assert of_group(kind, group, scale, shift) == pytest.approx(expected, rel=0.05, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@given(group=Group)
def test_the_order_of_siblings_changes_nothing(kind: Kind, group: list[tuple[float, int, int]]) -> None:
    assert of_group(kind, group[::-1])[::-1] == pytest.approx(of_group(kind, group), abs=1e-9)
