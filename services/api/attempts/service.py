"""Leases, heartbeats and ends of clients' attempts. Each works in the caller's transaction."""

from __future__ import annotations

import time
from dataclasses import replace

from leyden.libs.attempts import Endpoints, attempt_key, attribute_failure, environment_block, secrets_block
from leyden.libs.contracts.api.attempts import EndedAttempt, EndRequest, Heartbeat, LeasedAttempt, StopReason
from leyden.libs.contracts.config import ExternalRunner
from leyden.libs.contracts.placeholders import MissingField
from leyden.libs.contracts.states import OutcomeKind
from leyden.libs.queue import external, leases
from leyden.libs.queue.external import AttemptStatus
from leyden.libs.queue.leases import Lease, Outcome
from leyden.libs.service import Problem
from leyden.libs.store.database import Session
from leyden.services.api.attempts.context import AttemptContext

KINDS = {
    "succeeded": OutcomeKind.SUCCEEDED,
    "failed": OutcomeKind.AGENT_ERROR,
    "given_back": OutcomeKind.INFRA_ERROR,
}
FIRST_LEASE_SECONDS = 60.0
"""Until the run's own `runner.lease_seconds` is read."""
CANCELLED = "the rollout or its run was cancelled"


async def start_attempt(session: Session, lease: Lease, context: AttemptContext) -> LeasedAttempt | None:
    """Starts a leased attempt; None where its task lacks a field of `agent.environment`: it ends as `infra_error`."""
    key = attempt_key(context.keys, lease)
    endpoints = Endpoints(context.gateway_url, context.collector_url, key, lease.runner.grant_reward)
    try:
        variables = environment_block(lease, endpoints)
    except MissingField as error:
        detail = f"task {lease.task_number} of {lease.dataset_id}: {error}"
        await leases.settle_all(session, [(lease, Outcome(OutcomeKind.INFRA_ERROR, detail=detail))])
        return None
    await leases.start_all(session, [lease])
    await leases.heartbeat_all(session, [lease.lease_id], lease_seconds(lease))
    return LeasedAttempt(
        id=lease.lease_id,
        run_id=lease.run_id,
        rollout_id=lease.rollout_id,
        number=lease.attempt,
        agent=lease.agent_name,
        dataset_id=lease.dataset_id,
        task_number=lease.task_number,
        task=lease.task,
        base_url=f"{context.gateway_url}/v1",
        api_key=key,
        environment=variables | secrets_block(lease, endpoints),
        takes_reward=lease.runner.stdout_reward,
        lease_seconds=lease_seconds(lease),
        timeout_seconds=lease.runner.timeout_seconds,
    )


def lease_seconds(lease: Lease) -> float:
    """The life of a lease without a heartbeat."""
    assert isinstance(lease.runner, ExternalRunner)
    return lease.runner.lease_seconds


async def renew(session: Session, status: AttemptStatus, context: AttemptContext) -> Heartbeat:
    """Renews a lease, or says why its agent must stop. An attempt beyond its timeout ends here."""
    lease = status.lease
    if not status.is_live:
        reason = StopReason.ENDED if status.outcome is not None else StopReason.LEASE_LOST
        return Heartbeat(lease_expires_at=status.expires_at, stop=reason, reason=why_over(status))
    if status.seconds > lease.runner.timeout_seconds:
        outcome = await _timeout(status, context)
        await leases.settle_all(session, [(lease, outcome)])
        return Heartbeat(lease_expires_at=status.expires_at, stop=StopReason.TIMEOUT, reason=outcome.detail)
    if not await leases.heartbeat_all(session, [lease.lease_id], lease_seconds(lease)):
        return Heartbeat(lease_expires_at=status.expires_at, stop=StopReason.CANCELLED, reason=CANCELLED)
    renewed = await external.lock_attempt(session, lease.run_id, lease.lease_id)
    assert renewed is not None
    return Heartbeat(lease_expires_at=renewed.expires_at, stop=None, reason=None)


async def end(
    session: Session, status: AttemptStatus, asked: EndRequest, context: AttemptContext
) -> tuple[EndedAttempt, bool]:
    """Ends an attempt; the second value says whether this request did it.

    Raises: Problem: the lease is lost, or the attempt was ended in another way
    """
    lease, outcome = status.lease, outcome_of(asked, status.lease)
    if not status.is_live:
        if status.outcome is None or not external.is_same_end(status.outcome, lease, outcome):
            raise Problem(409, why_over(status), cause="lease_lost" if status.outcome is None else "ended")
        return _ended(lease, status.outcome), False
    if not status.is_wanted:
        outcome = replace(outcome, kind=OutcomeKind.CANCELLED, reward=None, detail=CANCELLED)
    elif status.seconds > lease.runner.timeout_seconds:
        outcome = await _timeout(status, context, outcome)
    elif asked.outcome != "given_back":
        outcome = await _judged(outcome, status.seconds, context)
    await leases.settle_all(session, [(lease, outcome)])
    return _ended(lease, outcome), True


def outcome_of(asked: EndRequest, lease: Lease) -> Outcome:
    """The outcome that the client reports.

    Raises: Problem: it gives a reward, and the run takes none of its agent
    """
    rewards = {"reward": asked.reward, "rewards": asked.rewards}
    given = {name: value for name, value in rewards.items() if value is not None}
    if given and not lease.runner.stdout_reward:
        detail = (
            f"{', '.join(given)}: the run takes no reward of its agent (reward.components, runner.stdout_reward): leave"
            " it out"
        )
        raise Problem(422, detail, cause="reward")
    output = asked.output.encode(errors="replace")[-lease.runner.output_bytes :].decode(errors="replace")
    facts = {**asked.facts, **given}
    return Outcome(KINDS[asked.outcome], asked.total, facts, detail=asked.reason, stdout_tail=output)


async def _judged(outcome: Outcome, seconds: float, context: AttemptContext) -> Outcome:
    """A failure, as the platform's where an endpoint of the agent was down, or may have been; another end with that."""
    return await attribute_failure(outcome, time.monotonic() - seconds, context.monitor)


async def _timeout(status: AttemptStatus, context: AttemptContext, outcome: Outcome | None = None) -> Outcome:
    detail = f"took {status.seconds:.1f} s, and runner.timeout_seconds is {status.lease.runner.timeout_seconds:g}"
    late = replace(outcome or Outcome(OutcomeKind.TIMEOUT), kind=OutcomeKind.TIMEOUT, reward=None, detail=detail)
    return await _judged(late, status.seconds, context)


def why_over(status: AttemptStatus) -> str:
    """The reason for which an attempt is over, for its client."""
    name = f"attempt {status.lease.attempt} of {status.lease.rollout_id}"
    if status.outcome is None:
        moment = status.expires_at.isoformat(timespec="seconds")
        return f"{name} had no heartbeat before its lease ended at {moment}: the task runs again; lease another attempt"
    return f"{name} has ended as {status.outcome.kind} already: lease another attempt"


def _ended(lease: Lease, outcome: Outcome) -> EndedAttempt:
    return EndedAttempt(
        id=lease.lease_id,
        rollout_id=lease.rollout_id,
        number=lease.attempt,
        kind=outcome.kind,
        reward=outcome.reward,
        detail=outcome.detail,
    )
