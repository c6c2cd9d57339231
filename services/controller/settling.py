"""The end of an attempt decides about its rollout: it counts, is excluded, or runs again. Pure functions.

A rollout's reward is its outcome's. An attempt that succeeded and printed none counts when the reward endpoint, its
telemetry or a user rewarded it or one of its calls: it then starts from 0 and credit adds those. An attempt without any
reward is the agent's own failure, like a crash or a timeout, and the run's `sampling.agent_failure` decides. Such a
failure may get its reward only when its group is complete (`store.failure_rewards`).
Infrastructure failures and lost leases run again up to `sampling.max_attempts` times and are then excluded; they never
become a reward. The same holds for failures after the gateway gave up a model call, for rewards of agents that caught
such an error and never got an answer (unless `sampling.failed_call` accepts them), and for timeouts of agents that
waited for an engine for more than a fifth of their time.
"""

from __future__ import annotations

from leyden.libs.contracts.config import RunConfig, Sampling
from leyden.libs.contracts.states import OutcomeKind, RolloutState
from leyden.libs.store.groups import WAITING_SHARE, AttemptFacts, Resolution

NO_REWARD = "no_reward"
LEASE_LOST = "lease_lost"
CALL_FAILED = "call_failed"
HELD = "held"


def resolve(ended: AttemptFacts, config: RunConfig) -> Resolution | None:
    """Returns the end of the rollout; None when it runs again."""
    sampling = config.sampling
    failure = _platform_failure(ended, sampling)
    if failure is not None:
        if ended.failures < sampling.max_attempts:
            return None
        return Resolution(ended.rollout_id, RolloutState.EXCLUDED, None, None, failure)
    if ended.kind is not OutcomeKind.SUCCEEDED:
        return _failed(ended, str(ended.kind), sampling)
    # An agent that may not print its reward starts from 0: others give it.
    if config.runner.stdout_reward and ended.reward is None and not ended.has_explicit_reward:
        return _failed(ended, NO_REWARD, sampling)
    return _finished(ended, ended.reward or 0.0, OutcomeKind.SUCCEEDED)


def _platform_failure(ended: AttemptFacts, sampling: Sampling) -> str | None:
    """Returns the reason of a failure that is not the agent's; None otherwise."""
    match ended.kind:
        case None:
            return LEASE_LOST
        case OutcomeKind.INFRA_ERROR | OutcomeKind.CANCELLED:
            return ended.kind
        case OutcomeKind.AGENT_ERROR | OutcomeKind.TIMEOUT if ended.call_failed:
            return CALL_FAILED
        case OutcomeKind.SUCCEEDED if ended.call_failed and sampling.failed_call == "retry":
            return CALL_FAILED
        case OutcomeKind.TIMEOUT if ended.waited_seconds > WAITING_SHARE * ended.seconds:
            return HELD
        case _:
            return None


def _failed(ended: AttemptFacts, reason: str, sampling: Sampling) -> Resolution:
    match sampling.agent_failure:
        case "reward":
            return _finished(ended, sampling.failure_reward, reason)
        case "exclude":
            return Resolution(ended.rollout_id, RolloutState.EXCLUDED, None, None, reason)


def _finished(ended: AttemptFacts, reward: float | None, reason: str) -> Resolution:
    return Resolution(ended.rollout_id, RolloutState.FINISHED, ended.attempt, reward, reason)


def retry_seconds(attempt: int, base: float) -> float:
    """Returns the pause after the `attempt`-th execution failed: the base, doubled each time, at most a minute."""
    return min(60.0, base * 2.0 ** (attempt - 1))
