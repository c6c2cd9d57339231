"""The attempts that run: services serve the agents of these alone, and writers lock them until their rows commit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from sqlalchemy import TextClause, text

from leyden.libs.store.database import ReadSession, Session


class AttemptKey(NamedTuple):
    """One execution of a rollout."""

    rollout_id: str
    attempt: int


MAY_RUN = """
    r.state = 'queued' AND u.intent = 'running' AND NOT EXISTS (
        SELECT FROM attempts WHERE attempts.rollout_id = r.id AND attempts.number > r.excused_attempt)
"""
"""SQL: whether rollout r of run u may have another attempt once it is due. The controller excuses the earlier ones."""

RUNNER_TYPE = "coalesce(g.runner_type, u.runner_type)"
"""SQL: the type of the runner that executes group g of run u."""

ROLLOUT_STATE = """(CASE WHEN rollouts.state = 'queued' AND EXISTS (
    SELECT FROM attempts WHERE attempts.rollout_id = rollouts.id AND attempts.state IN ('leased', 'running')
) THEN 'running' WHEN rollouts.state = 'queued' AND rollouts.grading_attempt > rollouts.excused_attempt THEN 'grading'
ELSE rollouts.state END)"""
"""SQL over `rollouts`: a `ShownRolloutState`."""

# The same condition as that of a heartbeat: an overdue lease may still be renewed and settled.
_RUNNING = """
    SELECT a.rollout_id, a.number
    FROM unnest(CAST(:rollout_ids AS text[]), CAST(:numbers AS integer[])) AS asked (rollout_id, number)
    JOIN attempts a ON a.rollout_id = asked.rollout_id AND a.number = asked.number
    JOIN rollouts r ON r.id = a.rollout_id
    JOIN runs u ON u.id = r.run_id
    WHERE a.state IN ('leased', 'running') AND r.state = 'queued' AND u.intent <> 'cancelled'
"""
_READ = text(_RUNNING)
_BEGAN = text("""
    SELECT extract(epoch FROM created_at)::double precision FROM attempts
    WHERE rollout_id = :rollout_id AND number = :number
""")
# SHARE and the end of the attempt wait for each other. The order of keys keeps two writers from a deadlock.
_LOCK = text(f"{_RUNNING} ORDER BY a.rollout_id, a.number FOR SHARE OF a")


async def running_attempts(session: ReadSession, attempts: Iterable[AttemptKey]) -> set[AttemptKey]:
    """The given attempts that run: leased, not settled or expired, their rollout and run not cancelled."""
    return await _select(session, _READ, attempts)


async def attempt_began_at(session: ReadSession, attempt: AttemptKey) -> float | None:
    """The moment at which an attempt was leased, in seconds since the epoch; None for an unknown one.

    No call of it arrives before.
    """
    began: float | None = await session.scalar(_BEGAN, {"rollout_id": attempt.rollout_id, "number": attempt.attempt})
    return began


async def lock_running_attempts(session: Session, attempts: Iterable[AttemptKey]) -> set[AttemptKey]:
    """The given attempts that run; none of them can be settled or expired before this transaction ends."""
    return await _select(session, _LOCK, attempts)


async def _select(session: ReadSession, statement: TextClause, attempts: Iterable[AttemptKey]) -> set[AttemptKey]:
    asked = set(attempts)
    columns = {"rollout_ids": [one.rollout_id for one in asked], "numbers": [one.attempt for one in asked]}
    return {AttemptKey(*row) for row in await session.execute(statement, columns)}
