"""Baselines by hand, and against the vectors that verl 0.9.1 and a re-implementation of Trinity computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.services.credit.baselines import EPSILON, Kind, advantages_per_rollout, advantages_per_state

ORACLE: dict[str, Any] = json.loads((Path(__file__).parents[1] / "trainer/oracles/rl-oracle-vectors.json").read_text())
GROUPS = {"A": [1.0, 0.0, 0.5, 0.0], "B": [1.0, 0.25]}


def advantages(kind: Kind, returns: list[float], rollouts: list[str] | None = None) -> list[float]:
    names = rollouts or [str(i) for i in range(len(returns))]
    return advantages_per_rollout(kind, np.array(returns), names, {}).advantages_C.tolist()


@pytest.mark.parametrize(
    ("kind", "name"),
    [("mean", "dr_grpo(mean only)"), ("mean_std", "grpo(std,eps1e-6)"), ("leave_one_out", "rloo")],
)
def test_single_turn_baselines_equal_verl(kind: Kind, name: str) -> None:
    ours = advantages(kind, GROUPS["A"]) + advantages(kind, GROUPS["B"])
    mask = np.array(ORACLE["inputs"]["mask"])
    expected = [row[np.flatnonzero(m)[0]] for row, m in zip(ORACLE["advantages"][name]["adv"], mask, strict=True)]
    assert ours == pytest.approx(expected, abs=1e-9)


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
    episodes = [sum(run["R"]) for run in runs.values()]
    by_state = advantages_per_state(kind, np.array(returns), rollouts, states, {}).advantages_C
    by_episode = dict(zip(runs, advantages(kind, episodes), strict=True))
    # Trinity divides by 1 + ε where it divides by no standard deviation.
    scale = 1 + EPSILON if kind == "mean" else 1
    ours = (by_state + [by_episode[name] for name in rollouts]) / scale
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
    found = advantages_per_rollout("mean", np.array([1.0]), ["a"], {"crashed": 0.0})
    assert (found.advantages_C.tolist(), found.baselines_C.tolist()) == ([0.5], [0.5])


@pytest.mark.parametrize("kind", ["mean", "mean_std", "leave_one_out"])
def test_one_rollout_alone_and_equal_rollouts_have_no_advantage(kind: Kind) -> None:
    assert advantages(kind, [0.7]) == [0.0]
    assert advantages(kind, [0.7, 0.7, 0.7]) == [0.0, 0.0, 0.0]
    # Discounting makes a rollout's own calls differ; equal rollouts still teach nothing about each other.
    assert advantages(kind, [0.9, 1.0, 0.9, 1.0], ["a", "a", "b", "b"]) == [0.0] * 4


def test_states_are_compared_among_themselves() -> None:
    # In state s: 1 and 0, mean 0.5; in state t one rollout alone; in u: a twice (mean 0.5) and b once.
    found = advantages_per_state(
        "mean",
        np.array([1.0, 0.0, 5.0, 0.0, 1.0, 0.1]),
        ["a", "b", "a", "a", "a", "b"],
        ["s", "s", "t", "u", "u", "u"],
        {},
    )
    assert found.advantages_C.tolist() == pytest.approx([0.5, -0.5, 0.0, -0.3, 0.7, -0.2])
    assert found.baselines_C.tolist() == pytest.approx([0.5, 0.5, 5.0, 0.3, 0.3, 0.3])


def test_siblings_that_ended_before_their_first_call_count_in_the_first_state() -> None:
    # Two solved, two crashed: mean 0.5 among the first calls; the second calls have nobody to compare with but another.
    returns, owners, states = np.array([1.0, 0.9, 1.0, 0.9]), ["a", "a", "b", "b"], ["", "search:ok"] * 2
    found = advantages_per_state("mean", returns, owners, states, {"c": 0.0, "d": 0.0})
    assert found.advantages_C.tolist() == pytest.approx([0.5, 0.0, 0.5, 0.0])


@pytest.mark.parametrize("kind", ["mean", "mean_std", "leave_one_out"])
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
