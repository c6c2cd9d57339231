"""The end of an attempt decides about its rollout: it counts, is excluded, or runs again.

A rollout's reward is its outcome's. An attempt that succeeded and printed none counts when the reward endpoint, its
telemetry or a user rewarded it or one of its calls: it then starts from 0 and credit adds those. An attempt without any
reward is the agent's own failure, like a crash or a timeout, and the run's `sampling.agent_failure` decides. Such a
failure may get its reward only when its group is complete (`store.failure_rewards`).
Infrastructure failures and lost leases run again up to `sampling.max_attempts` times and are then excluded; they never
become a reward. The same holds for failures after the gateway gave up a model call, and for rewards of agents that
caught such an error and never got an answer (unless `sampling.failed_call` accepts them).

An attempt that succeeded is graded before it counts if the run names components: its reward is the settled total, and
one without a total is excluded, since a grader that failed is no 0. A re-roll whose requests differed from the record
is excluded, whatever its agent made of that: it measures no value of the recorded state.

It holds for waits, too, whatever ended the attempt. An attempt that failed, or that has no reward, waited for the
platform for more than a fifth of its time, or got no answer to its last request. An attempt with a reward lost requests
in that way: no answer came, not even to a later try. One that ended well without a reward while an endpoint of the
agent was away is the platform's failure, too: its requests, or the reward that it sent, may have reached nobody. So is
one with a reward that got no answer after the gateway was away: the agent may have caught that error.
"""

from __future__ import annotations

from enum import Enum

from leyden.libs.contracts.config import RunConfig, Sampling
from leyden.libs.contracts.states import DIVERGED, UNGRADED, OutcomeKind, RolloutState
from leyden.libs.store.database import Session
from leyden.libs.store.runs.facts import run_configs
from leyden.libs.store.runs.phases import runs_without_success
from leyden.libs.store.runs.rollouts import (
    AttemptFacts,
    Resolution,
    await_grades,
    complete_groups,
    ended_attempts,
    excuse_attempts,
    resolve_rollouts,
)
from leyden.services.controller.runs.rerolls import reroll
from leyden.services.controller.runs.stopping import fail_runs

NO_REWARD = "no_reward"
LEASE_LOST = "lease_lost"
CALL_FAILED = "call_failed"
HELD = "held"
WAITING_SHARE = 0.2
"""Share of an attempt's time: a failure counts as the platform's when model calls waited for longer.

Why not 0: every change of weights holds calls for a moment, and that must not excuse an agent that never ends."""
USUAL_FACTOR = 2.0
"""A request that a timeout cut counts as unanswered when it took so many times the attempt's longest with an
answer, without the waits of that one."""
UNANSWERED_SECONDS = 1.0
"""A last request without an answer counts when it waited for so long: an engine in good health answers before."""


class Next(Enum):
    """Steps of a rollout that has not ended: it runs again, or its attempt is graded."""

    AGAIN = "again"
    GRADE = "grade"


async def settle(
    session: Session, groups_without_success: int, retry_base: float
) -> tuple[list[Resolution], list[str], list[str]]:
    """Ends rollouts whose last attempt ended, hands those with components to the graders, and ends groups whose
    rollouts all have ended; returns all three.

    Args:
        groups_without_success: a run fails after so many groups in a row
        retry_base: seconds that a rollout rests after its first attempt failed
    """
    ended = await ended_attempts(session)
    if not ended:
        return [], [], []
    found = await run_configs(session, {one.run_id for one in ended})
    # A run whose document does not parse fails in the same tick, and its rollouts with it.
    configs = {run: config for run, config in found.items() if isinstance(config, RunConfig)}
    ended = [one for one in ended if one.run_id in configs]
    resolved = [resolve(one, configs[one.run_id]) for one in ended]
    resolutions = [one for one in resolved if isinstance(one, Resolution)]
    await resolve_rollouts(session, resolutions)
    attempts: dict[Next, dict[str, int]] = {one: {} for one in Next}
    for one, resolution in zip(ended, resolved, strict=True):
        if isinstance(resolution, Next):
            attempts[resolution][one.rollout_id] = one.attempt
    again = attempts[Next.AGAIN]
    await excuse_attempts(session, again, {one: retry_seconds(number, retry_base) for one, number in again.items()})
    await await_grades(session, attempts[Next.GRADE])
    await reroll(session)
    complete = await complete_groups(session)
    if complete:
        failing = await runs_without_success(session, groups_without_success)
        await fail_runs(session, {run: f"no rollout succeeds: {cause}" for run, cause in failing.items()})
    return resolutions, list(attempts[Next.GRADE]), complete


def resolve(ended: AttemptFacts, config: RunConfig) -> Resolution | Next:
    """Returns the end of the rollout, or its next step."""
    sampling = config.sampling
    failure = _platform_failure(ended, config)
    if failure is not None:
        if ended.failures < sampling.max_attempts:
            return Next.AGAIN
        return Resolution(ended.rollout_id, RolloutState.EXCLUDED, None, None, failure)
    if ended.diverged:
        return Resolution(ended.rollout_id, RolloutState.EXCLUDED, None, None, DIVERGED)
    if ended.kind is not OutcomeKind.SUCCEEDED:
        return _failed(ended, str(ended.kind), sampling)
    if not _has_reward(ended, config):
        return _failed(ended, NO_REWARD, sampling)
    if config.reward is None:
        return _finished(ended, ended.reward or 0.0, OutcomeKind.SUCCEEDED)
    if not ended.is_graded:
        return Next.GRADE
    if ended.total is None:
        return Resolution(ended.rollout_id, RolloutState.EXCLUDED, None, None, UNGRADED)
    return _finished(ended, ended.total, OutcomeKind.SUCCEEDED)


def _has_reward(ended: AttemptFacts, config: RunConfig) -> bool:
    if config.reward is not None:
        return ended.reward is not None or not config.reward.needs_agents_line
    # An agent that may not print its reward starts from 0: others give it.
    return ended.reward is not None or ended.has_explicit_reward or not config.runner.stdout_reward


def _may_lack_a_reward(ended: AttemptFacts, config: RunConfig) -> bool:
    """Whether a reward that the agent sent may not have come."""
    if config.reward is not None:
        sent = {one.name for one in config.reward.components if one.source == "otlp"}
        return not sent <= ended.feedback or not _has_reward(ended, config)
    sends = config.runner.grant_reward or not _has_reward(ended, config)
    return sends and ended.reward is None and not ended.has_explicit_reward


def _platform_failure(ended: AttemptFacts, config: RunConfig) -> str | None:
    """Returns the reason of a failure that is not the agent's; None otherwise."""
    match ended.kind:
        case None:
            return LEASE_LOST
        case OutcomeKind.INFRA_ERROR | OutcomeKind.CANCELLED:
            return ended.kind
        case OutcomeKind.SUCCEEDED if ended.was_cut_off and _may_lack_a_reward(ended, config):
            return HELD
        case OutcomeKind.SUCCEEDED if _has_reward(ended, config):
            if config.sampling.failed_call == "accept":
                return None
            return HELD if ended.lost_gateway else _failed_request(ended, ended.lost_seconds)
        case _:
            return _failed_request(ended, ended.waited_seconds)


def _failed_request(ended: AttemptFacts, waited_seconds: float) -> str | None:
    if ended.call_failed:
        return CALL_FAILED
    patience = UNANSWERED_SECONDS
    if ended.kind is OutcomeKind.TIMEOUT:
        # It cuts whatever request runs, and a long prompt takes a healthy engine a while before the first token.
        patience = max(patience, USUAL_FACTOR * ended.answered_seconds)
    is_unanswered = ended.unanswered_seconds >= patience
    return HELD if is_unanswered or waited_seconds > WAITING_SHARE * ended.seconds else None


def _failed(ended: AttemptFacts, reason: str, sampling: Sampling) -> Resolution:
    # An evaluation counts every failure: without its crashes a version that crashes more would look better.
    if sampling.agent_failure == "exclude" and not ended.is_evaluation:
        return Resolution(ended.rollout_id, RolloutState.EXCLUDED, None, None, reason)
    return _finished(ended, sampling.failure_reward, reason)


def _finished(ended: AttemptFacts, reward: float | None, reason: str) -> Resolution:
    return Resolution(ended.rollout_id, RolloutState.FINISHED, ended.attempt, reward, reason)


def retry_seconds(attempt: int, base: float) -> float:
    """Returns the pause after the `attempt`-th execution failed: the base, doubled each time, at most a minute."""
    return min(60.0, base * 2.0 ** (attempt - 1))
