"""Whatever an agent prints is a verdict: a reward within bounds, the agent's error, or no reward."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.libs.contracts.rewards import is_reward
from leyden.libs.contracts.states import OutcomeKind
from leyden.services.runner.verdict import FACTS_BYTES, judge
from tests.unit.runner.test_verdict import ended

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
def test_a_reward_line_counts_whatever_stands_around_it(reward: float, before: list[str], after: list[str]) -> None:
    outcome = judge(ended("\n".join([*before, json.dumps({"reward": reward}), *after]).encode("utf-8", "replace")))
    assert (outcome.kind, outcome.reward, outcome.facts) == (OutcomeKind.SUCCEEDED, reward, {"reward": reward})


@given(
    st.binary(max_size=200) | st.lists(LINES, max_size=5).map(lambda lines: "\n".join(lines).encode("utf-8", "replace"))
)
def test_noise_is_a_verdict(stdout: bytes) -> None:
    _is_verdict(stdout)


@given(st.dictionaries(st.sampled_from(["reward", "rewards", "success"]), ODD, max_size=3))
def test_a_line_of_wrong_types_is_a_verdict(line: dict[str, Any]) -> None:
    _is_verdict(json.dumps(line).encode())


@given(REWARDS, st.data())
def test_a_line_spoilt_anywhere_is_a_verdict(reward: float, data: st.DataObject) -> None:
    line = bytearray(json.dumps({"rewards": {"a": reward, "b": 1}, "success": True}).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        line[data.draw(st.integers(0, len(line) - 1))] = data.draw(st.integers(0, 255))
    _is_verdict(bytes(line[: data.draw(st.integers(0, len(line)))]))


@pytest.mark.parametrize("levels", [100, 5_000, 200_000])
def test_a_line_of_any_depth_is_a_verdict(levels: int) -> None:
    _is_verdict(b'{"reward": 1, "a": ' + b"[" * levels + b"]" * levels + b"}")
    _is_verdict(b'{"rewards": ' + b'{"a": ' * levels + b"1" + b"}" * levels + b"}")


def _is_verdict(stdout: bytes) -> None:
    outcome = judge(ended(stdout))
    assert outcome.kind in {OutcomeKind.SUCCEEDED, OutcomeKind.AGENT_ERROR}
    assert (outcome.detail is None) == (outcome.kind is OutcomeKind.SUCCEEDED)
    if outcome.reward is not None:
        assert math.isfinite(outcome.reward)
        assert is_reward(outcome.reward)
    assert len(json.dumps(outcome.facts)) <= FACTS_BYTES
