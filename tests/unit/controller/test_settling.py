from __future__ import annotations

import pytest

from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.states import OutcomeKind, RolloutState
from leyden.libs.store.runs.rollouts import AttemptFacts, Resolution
from leyden.services.controller.runs.settling import Next, resolve, retry_seconds

FINISHED, EXCLUDED = RolloutState.FINISHED, RolloutState.EXCLUDED


def run_config(**parts: object) -> RunConfig:
    return RunConfig.model_validate({"name": "n", "dataset": "d", "agent": {"command": ["x"]}, **parts})


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
        "waited_seconds": 0.0,
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
        # Its model calls were held for much of its time: no engine served, which is not the agent's fault.
        ("timeout", {"waited_seconds": 6.0}, None),
        ("timeout", {"waited_seconds": 6.0, "failures": 3}, Resolution("r", EXCLUDED, None, None, "held")),
        ("agent_error", {"call_failed": True}, None),
        ("succeeded", {"call_failed": True, "reward": 0.0}, None),
        ("succeeded", {"call_failed": True, "failures": 3}, Resolution("r", EXCLUDED, None, None, "call_failed")),
        ("timeout", {"waited_seconds": 4.0}, None),
        ("timeout", {"waited_seconds": 1.9}, Resolution("r", FINISHED, 2, -1.0, "timeout")),
        # Whatever ended it: its client gave up waiting and raised an error, or went on without a reward.
        ("agent_error", {"waited_seconds": 6.0}, None),
        ("succeeded", {"waited_seconds": 6.0}, None),
        # Its last request had no answer: a tool took most of its time.
        ("agent_error", {"waited_seconds": 1.5, "unanswered_seconds": 1.5}, None),
        # A timeout cuts a request of an agent that never ends; one of an engine that stopped takes longer than others.
        (
            "timeout",
            {"unanswered_seconds": 1.9, "answered_seconds": 1.0},
            Resolution("r", FINISHED, 2, -1.0, "timeout"),
        ),
        ("timeout", {"unanswered_seconds": 1.9, "answered_seconds": 0.5}, None),
        ("timeout", {"unanswered_seconds": 1.9}, None),
        # Its requests may have reached nobody.
        ("succeeded", {"was_cut_off": True}, None),
        ("succeeded", {"was_cut_off": True, "failures": 3}, Resolution("r", EXCLUDED, None, None, "held")),
        (
            "succeeded",
            {"was_cut_off": True, "has_explicit_reward": True},
            Resolution("r", FINISHED, 2, 0.0, "succeeded"),
        ),
        ("succeeded", {"lost_gateway": True, "reward": 0.0}, None),
        (
            "succeeded",
            {"lost_gateway": True, "reward": 0.0, "failures": 3},
            Resolution("r", EXCLUDED, None, None, "held"),
        ),
        # Answers that came late are no excuse for a reward; lost ones are.
        ("succeeded", {"reward": 0.0, "waited_seconds": 6.0}, Resolution("r", FINISHED, 2, 0.0, "succeeded")),
        ("succeeded", {"reward": 0.0, "waited_seconds": 6.0, "lost_seconds": 3.0}, None),
        ("succeeded", {"reward": 0.0, "lost_seconds": 1.5, "unanswered_seconds": 1.5}, None),
        ("succeeded", {"reward": 0.5, "lost_seconds": 0.3}, Resolution("r", FINISHED, 2, 0.5, "succeeded")),
        # An engine in good health would have answered; the agent closed the call at once.
        ("agent_error", {"unanswered_seconds": 0.4}, Resolution("r", FINISHED, 2, -1.0, "agent_error")),
    ],
)
def test_what_becomes_of_a_rollout(kind: str | None, changes: dict[str, object], resolution: Resolution | None) -> None:
    config = run_config(sampling={"failure_reward": -1.0, "max_attempts": 3})
    found = resolve(ended(None if kind is None else OutcomeKind(kind), **changes), config)
    assert found == (Next.AGAIN if resolution is None else resolution)


def test_an_agent_that_may_not_print_its_reward_starts_from_0() -> None:
    config = run_config(sampling={"failure_reward": -1.0}, runner={"stdout_reward": False})
    assert resolve(ended(OutcomeKind.SUCCEEDED), config) == Resolution("r", FINISHED, 2, 0.0, "succeeded")


OTLP = {"reward": {"components": [{"name": "score", "from": "otlp"}]}}


@pytest.mark.parametrize(
    ("sections", "facts", "is_again"),
    [
        ({"runner": {"stdout_reward": False, "grant_reward": True}}, {}, True),
        ({"runner": {"stdout_reward": False, "grant_reward": True}}, {"has_explicit_reward": True}, False),
        ({"runner": {"grant_reward": True}}, {"reward": 0.5}, False),
        # Its agent sends none, so that none is lost.
        ({"runner": {"stdout_reward": False}}, {}, False),
        (OTLP, {}, True),
        (OTLP, {"feedback": frozenset({"other"})}, True),
    ],
)
def test_a_reward_that_may_be_lost_is_no_0(
    sections: dict[str, object], facts: dict[str, object], is_again: bool
) -> None:
    found = resolve(ended(OutcomeKind.SUCCEEDED, was_cut_off=True, **facts), run_config(**sections))
    assert (found is Next.AGAIN) == is_again


def test_a_value_that_came_before_an_outage_is_graded() -> None:
    attempt = ended(OutcomeKind.SUCCEEDED, was_cut_off=True, feedback=frozenset({"score"}))
    assert resolve(attempt, run_config(**OTLP)) is Next.GRADE


@pytest.mark.parametrize("kind", [OutcomeKind.AGENT_ERROR, OutcomeKind.TIMEOUT, OutcomeKind.SUCCEEDED])
def test_the_agents_own_failures_can_be_excluded(kind: OutcomeKind) -> None:
    reason = "no_reward" if kind is OutcomeKind.SUCCEEDED else kind
    assert resolve(ended(kind), run_config(sampling={"agent_failure": "exclude"})) == Resolution(
        "r", EXCLUDED, None, None, reason
    )


def test_evaluations_count_failures_that_training_excludes() -> None:
    config = run_config(sampling={"agent_failure": "exclude", "failure_reward": -1.0})
    counted = resolve(ended(OutcomeKind.AGENT_ERROR, is_evaluation=True), config)
    assert counted == Resolution("r", FINISHED, 2, -1.0, "agent_error")


def test_a_run_may_accept_a_reward_beside_a_failed_call() -> None:
    config = run_config(sampling={"failed_call": "accept"})
    accepted = resolve(ended(OutcomeKind.SUCCEEDED, call_failed=True, reward=0.5), config)
    assert accepted == Resolution("r", FINISHED, 2, 0.5, "succeeded")


def test_a_run_may_accept_a_reward_beside_a_lost_request() -> None:
    config = run_config(sampling={"failed_call": "accept"})
    accepted = resolve(ended(OutcomeKind.SUCCEEDED, lost_seconds=6.0, reward=0.5), config)
    assert accepted == Resolution("r", FINISHED, 2, 0.5, "succeeded")


def test_retries_back_off() -> None:
    assert [retry_seconds(attempt, 0.5) for attempt in (1, 2, 3, 99)] == [0.5, 1.0, 2.0, 60.0]


GRADED = [{"name": "answer", "grader": {"type": "length"}}]
LINE = {"name": "outcome", "from": "agent"}


@pytest.mark.parametrize(
    ("components", "kind", "changes", "expected"),
    [
        (GRADED, "succeeded", {}, Next.GRADE),
        (GRADED, "succeeded", {"is_graded": True, "total": 0.5}, Resolution("r", FINISHED, 2, 0.5, "succeeded")),
        # No component gave a number: that is no 0.
        (GRADED, "succeeded", {"is_graded": True}, Resolution("r", EXCLUDED, None, None, "ungraded")),
        (GRADED, "timeout", {}, Resolution("r", FINISHED, 2, -1.0, "timeout")),
        (GRADED, "succeeded", {"call_failed": True}, Next.AGAIN),
        ([LINE, *GRADED], "succeeded", {}, Resolution("r", FINISHED, 2, -1.0, "no_reward")),
        ([LINE, *GRADED], "succeeded", {"reward": 0.5}, Next.GRADE),
        ([{**LINE, "weight": 0.0}, *GRADED], "succeeded", {}, Next.GRADE),
    ],
)
def test_an_attempt_with_components_is_graded_before_it_counts(
    components: list[dict[str, object]], kind: str, changes: dict[str, object], expected: object
) -> None:
    config = run_config(sampling={"failure_reward": -1.0}, reward={"components": components})
    assert resolve(ended(OutcomeKind(kind), **changes), config) == expected
