from __future__ import annotations

import pytest

from leyden.libs.contracts.config import Sampling
from leyden.libs.contracts.states import OutcomeKind, RolloutState
from leyden.libs.store.groups import AttemptFacts, Resolution
from leyden.services.controller.settling import resolve, retry_seconds

FINISHED, EXCLUDED = RolloutState.FINISHED, RolloutState.EXCLUDED


def ended(kind: OutcomeKind | None, **changes: object) -> AttemptFacts:
    values: dict[str, object] = {
        "rollout_id": "r",
        "run_id": "run",
        "attempt": 2,
        "kind": kind,
        "reward": None,
        "failures": 2,
        "has_explicit_reward": False,
        "seconds": 10.0,
        "held_seconds": 0.0,
    }
    return AttemptFacts(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "changes", "resolution"),
    [
        ("succeeded", {"reward": 0.5}, Resolution("r", FINISHED, 2, 0.5, "succeeded")),
        # Its door gave the reward: the outcome itself adds nothing.
        ("succeeded", {"has_explicit_reward": True}, Resolution("r", FINISHED, 2, 0.0, "succeeded")),
        ("succeeded", {}, Resolution("r", FINISHED, 2, -1.0, "no_reward")),
        ("agent_error", {}, Resolution("r", FINISHED, 2, -1.0, "agent_error")),
        ("timeout", {}, Resolution("r", FINISHED, 2, -1.0, "timeout")),
        ("infra_error", {}, None),
        ("infra_error", {"failures": 3}, Resolution("r", EXCLUDED, None, None, "infra_error")),
        (None, {}, None),
        (None, {"failures": 3}, Resolution("r", EXCLUDED, None, None, "lease_lost")),
        # A cancelled attempt is nobody's failure, however many there were.
        ("cancelled", {"attempt": 9, "failures": 0}, None),
        # Its model calls were held for most of its time: no engine served, which is not the agent's fault.
        ("timeout", {"held_seconds": 6.0}, None),
        ("timeout", {"held_seconds": 6.0, "failures": 3}, Resolution("r", EXCLUDED, None, None, "held")),
        ("agent_error", {"call_failed": True}, None),
        ("timeout", {"held_seconds": 4.0}, Resolution("r", FINISHED, 2, -1.0, "timeout")),
    ],
)
def test_what_becomes_of_a_rollout(kind: str | None, changes: dict[str, object], resolution: Resolution | None) -> None:
    sampling = Sampling(failure_reward=-1.0, max_attempts=3)
    assert resolve(ended(None if kind is None else OutcomeKind(kind), **changes), sampling) == resolution


@pytest.mark.parametrize("kind", [OutcomeKind.AGENT_ERROR, OutcomeKind.TIMEOUT, OutcomeKind.SUCCEEDED])
def test_the_agents_own_failures_can_be_left_out(kind: OutcomeKind) -> None:
    reason = "no_reward" if kind is OutcomeKind.SUCCEEDED else kind
    assert resolve(ended(kind), Sampling(agent_failure="exclude")) == Resolution("r", EXCLUDED, None, None, reason)


def test_retries_back_off() -> None:
    assert [retry_seconds(attempt, 0.5) for attempt in (1, 2, 3, 99)] == [0.5, 1.0, 2.0, 60.0]
