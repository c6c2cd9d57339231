"""The phases of a run's time, by hand-worked seconds."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from leyden.libs.cli.commands.demo import DemoOptions, run_document
from leyden.libs.cli.view.phases import Phase, in_words, phases
from leyden.libs.contracts.api.rollouts import Attempt, Call
from leyden.libs.contracts.api.runs import Progress, Run, Step
from leyden.libs.contracts.conversation import Dialect

BEGUN = datetime(2026, 1, 2, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return BEGUN + timedelta(seconds=seconds)


def run(seconds: float) -> Run:
    progress = Progress(step=1, steps=1, policy_version=1, rollouts={}, reward_mean=None)
    return Run(
        id="run-a", name="a", dataset_id="d", intent="running", phase="completed", reason=None, created_at=at(0),
        started_at=at(0), finished_at=at(seconds), progress=progress, allowed_actions=[],
        config=run_document(DemoOptions()),
    )  # fmt: skip


def step(start: float, end: float) -> Step:
    return Step(
        number=1, metrics={}, groups={}, rollouts=1, reward_mean=None, reward_std=None, facts={}, started_at=at(start),
        created_at=at(end),
    )  # fmt: skip


def attempt(start: float, end: float) -> Attempt:
    return Attempt(
        number=1, state="finished", owner="r", lease_expires_at=at(end), created_at=at(start), started_at=at(start),
        finished_at=at(end), outcome=None,
    )  # fmt: skip


def call(arrived: float, held: float, end: float) -> Call:
    return Call(
        id="c", rollout_id="r", attempt=1, request_id="c", choice=0, status="completed", trainable=True,
        untrainable_reason=None, dialect=Dialect.CHAT_COMPLETIONS, request={}, turns=(), tools=(), answer=None,
        prompt_tokens=1, completion_tokens=0, cached_tokens=0, sampled_ids=[], logprobs=[],
        policy_versions=[], temperature=1.0, finish_reason="stop",
        queued_seconds=held, first_token_seconds=None, total_seconds=end - arrived, created_at=at(end), credit=None,
    )  # fmt: skip


def seconds(found: list[Phase]) -> dict[str, float]:
    assert abs(sum(phase.share for phase in found) - 1) < 1e-9
    return {phase.name: round(phase.seconds, 6) for phase in found if phase.seconds > 1e-6}


def test_each_second_belongs_to_one_phase() -> None:
    attempts = [(attempt(2, 10), [call(4, 0.5, 6), call(7, 0, 8)]), (attempt(16, 18), [call(17, 0.25, 18)])]
    # Two seconds until the first attempt, a step from 11 to 15, and one more until the next attempt.
    assert seconds(phases(run(20), [step(11, 15)], attempts)) == {
        "trainer": 4.0,
        "agents starting": 3.0,
        "engine": 1.5 + 1 + 0.75,
        "hand-over": 0.5 + 1 + 0.25,
        "agents at work": 1 + 2,
        "beginning": 2,
        "waiting": 1 + 2,
    }


def test_attempts_share_time_and_the_trainer_does_not() -> None:
    starting = [(attempt(0, 4), [call(4, 0, 4)])] * 2
    answered = [(attempt(0, 4), [call(0, 0, 4)])]
    assert seconds(phases(run(4), [step(1, 2)], starting + answered)) == {
        "trainer": 1.0,
        "agents starting": 2.0,
        "engine": 1.0,
    }


def test_attempts_that_did_not_start_or_end_count_as_far_as_they_are_recorded() -> None:
    queued = attempt(0, 1).model_copy(update={"started_at": None})
    lost = attempt(1, 9).model_copy(update={"finished_at": None})
    assert seconds(phases(run(3), [], [(queued, []), (lost, [])])) == {"agents starting": 2.0, "beginning": 1.0}


def test_the_longest_phase_is_named() -> None:
    words = in_words([Phase("trainer", 30.0, 0.75), Phase("engine", 10.0, 0.25)])
    assert words.splitlines() == [
        "phases of 40 s:",
        "  trainer   30.0 s  75%  a step is computed and written",
        "  engine    10.0 s  25%  engines answer calls",
        "the longest: trainer, 75% of the time (a step is computed and written)",
    ]
