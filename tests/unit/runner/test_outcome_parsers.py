"""Any output of an agent gives an outcome: a reward within bounds, the agent's error, or no reward."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.libs.contracts.rewards import is_reward
from leyden.libs.contracts.states import OutcomeKind
from leyden.services.runner.outcome import FACTS_BYTES, outcome_of
from tests.unit.runner.test_outcome import ended

REWARDS = st.floats(-1e6, 1e6) | st.integers(-(10**6), 10**6)
ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["reward", "a", ""]), inner, max_size=3)
    ),
    max_leaves=6,
)
LINES = st.text(max_size=30) | st.sampled_from(['{"reward"', '"reward": 1', "{}", "[]", '{"a": {"reward": 1}}'])


@given(REWARDS, st.lists(LINES, max_size=3), st.lists(st.sampled_from(["", "done", "{", "[1]", '"x"']), max_size=3))
def test_a_reward_line_counts_among_other_lines(reward: float, before: list[str], after: list[str]) -> None:
    outcome = outcome_of(ended("\n".join([*before, json.dumps({"reward": reward}), *after]).encode("utf-8", "replace")))
    assert (outcome.kind, outcome.reward, outcome.facts) == (OutcomeKind.SUCCEEDED, reward, {"reward": reward})


@given(
    st.binary(max_size=200) | st.lists(LINES, max_size=5).map(lambda lines: "\n".join(lines).encode("utf-8", "replace"))
)
def test_noise_has_an_outcome(stdout: bytes) -> None:
    _has_outcome(stdout)


@given(st.dictionaries(st.sampled_from(["reward", "rewards", "success"]), ODD, max_size=3))
def test_a_line_of_wrong_types_has_an_outcome(line: dict[str, Any]) -> None:
    _has_outcome(json.dumps(line).encode())


@given(REWARDS, st.data())
def test_a_line_spoilt_anywhere_has_an_outcome(reward: float, data: st.DataObject) -> None:
    line = bytearray(json.dumps({"rewards": {"a": reward, "b": 1}, "success": True}).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        line[data.draw(st.integers(0, len(line) - 1))] = data.draw(st.integers(0, 255))
    _has_outcome(bytes(line[: data.draw(st.integers(0, len(line)))]))


@pytest.mark.parametrize("levels", [100, 5_000, 200_000])
def test_a_line_of_any_depth_has_an_outcome(levels: int) -> None:
    _has_outcome(b'{"reward": 1, "a": ' + b"[" * levels + b"]" * levels + b"}")
    _has_outcome(b'{"rewards": ' + b'{"a": ' * levels + b"1" + b"}" * levels + b"}")


def _has_outcome(stdout: bytes) -> None:
    outcome = outcome_of(ended(stdout))
    assert outcome.kind in {OutcomeKind.SUCCEEDED, OutcomeKind.AGENT_ERROR}
    assert (outcome.detail is None) == (outcome.kind is OutcomeKind.SUCCEEDED)
    if outcome.reward is not None:
        assert math.isfinite(outcome.reward)
        assert is_reward(outcome.reward)
    assert len(json.dumps(outcome.facts)) <= FACTS_BYTES
