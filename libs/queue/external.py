"""Attempts of clients: agents that the platform does not start. The leases are those of `leases`.

A client asks for one attempt at a time and names its request, so that a repeat after a lost answer gets the same one:
the owner of a lease is `worker/key`, once for each agent of the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import text

from leyden.libs.contracts.states import AttemptState, OutcomeKind, RunPhase
from leyden.libs.queue.leases import DUE, OF_LEASED, Lease, Outcome, lease_of, lease_rollouts, outcome_row
from leyden.libs.store.database import ReadSession, Session

EXTERNAL = "external"
ENDED_PHASES = frozenset({RunPhase.COMPLETED, RunPhase.FAILED, RunPhase.CANCELLED})

_OF_AGENT = "JOIN groups g ON g.id = r.group_id AND g.agent IS NOT DISTINCT FROM CAST(:agent AS text)"
_DEMAND = text(f"""
    SELECT coalesce(jsonb_path_query_first(u.config, '$.agents[*] ? (@.name == $name).runner.type',
               jsonb_build_object('name', CAST(:agent AS text))) #>> '{{}}', u.runner_type) AS runner_type,
           jsonb_path_query_array(u.config, '$.agents[*].name') AS agents, s.phase, u.intent,
           EXISTS (SELECT FROM rollouts r {_OF_AGENT} WHERE r.run_id = u.id AND {DUE}) AS is_due,
           EXISTS (SELECT FROM attempts a JOIN rollouts r ON r.id = a.rollout_id {_OF_AGENT}
                   WHERE a.run_id = u.id AND a.owner = :owner AND a.state IN ('leased', 'running')) AS is_held
    FROM runs u LEFT JOIN run_status s ON s.run_id = u.id WHERE u.id = :run_id
""")  # noqa: S608  # constants alone

# Two requests with one owner take turns. SKIP LOCKED: clients that ask at once look at different rollouts.
_LOCK_OWNER = text("SELECT pg_advisory_xact_lock(hashtextextended('attempt of ' || :owner, 0))")
_NEXT = text(f"""
    SELECT r.id FROM rollouts r JOIN runs u ON u.id = r.run_id {_OF_AGENT} WHERE r.run_id = :run_id AND {DUE}
    ORDER BY r.created_at, r.id LIMIT 1 FOR NO KEY UPDATE OF r SKIP LOCKED
""")  # noqa: S608  # constants alone

_COLUMNS = "a.rollout_id, a.number, a.run_id, a.lease_id, a.lease_expires_at, a.started_at"
_HELD = text(f"""
    WITH leased AS (SELECT {_COLUMNS} FROM attempts a JOIN rollouts r ON r.id = a.rollout_id {_OF_AGENT}
        WHERE a.run_id = :run_id AND a.owner = :owner AND a.state IN ('leased', 'running'))
    {OF_LEASED}
""")  # noqa: S608  # constants alone
# The lock keeps the state as it is read until the caller's transaction ends.
_FIND = text(f"""
    WITH leased AS (SELECT {_COLUMNS} FROM attempts a
        WHERE a.run_id = :run_id AND a.lease_id = :lease_id FOR NO KEY UPDATE)
    {OF_LEASED}
""")  # noqa: S608  # constants alone
_STATUS = text("""
    SELECT a.state, a.lease_expires_at, r.state = 'queued' AND u.intent NOT IN ('cancelled', 'deleted') AS is_wanted,
           extract(epoch FROM coalesce(a.finished_at, clock_timestamp()) - a.started_at)::float8 AS seconds,
           o.kind, o.reward, o.facts, o.detail, o.stdout_tail
    FROM attempts a
    JOIN rollouts r ON r.id = a.rollout_id
    JOIN runs u ON u.id = r.run_id
    LEFT JOIN outcomes o ON o.rollout_id = a.rollout_id AND o.attempt = a.number
    WHERE a.lease_id = :lease_id
""")


@dataclass(frozen=True)
class Demand:
    """The rollouts of a run for a client that asks for one.

    Args: agents: the names of the run's `agents`; runner_type: of the agent that the client plays
    """

    runner_type: str
    agents: list[str]
    has_ended: bool
    is_due: bool
    is_held: bool
    """This client has an attempt already: its request is a repeat."""


@dataclass(frozen=True)
class AttemptStatus:
    """An attempt of a client, as it is now.

    Args: seconds: since its start, to its end where it has ended; is_wanted: rollout and run go on
    """

    lease: Lease
    state: AttemptState
    expires_at: datetime
    is_wanted: bool
    seconds: float
    outcome: Outcome | None

    @property
    def is_live(self) -> bool:
        """Whether its lease may be renewed and settled; one that is overdue may, until the controller ends it."""
        return self.state in {AttemptState.LEASED, AttemptState.RUNNING}


async def read_demand(session: ReadSession, run_id: str, owner: str, agent: str | None = None) -> Demand | None:
    """Returns whether a client of the run has work; None for an unknown run.

    Args: agent: the one of the run's `agents` that the client plays
    """
    row = (await session.execute(_DEMAND, {"run_id": run_id, "owner": owner, "agent": agent})).one_or_none()
    if row is None:
        return None
    has_ended = row.phase in ENDED_PHASES or row.intent in {"cancelled", "deleted"}
    return Demand(row.runner_type, row.agents, has_ended, row.is_due, row.is_held)


async def lease_next(
    session: Session, run_id: str, owner: str, seconds: float, agent: str | None = None
) -> tuple[Lease | None, bool]:
    """Leases the next due rollout of an external agent of a run; None when another client was quicker.

    The second value: whether the lease is new. Idempotency key: owner and agent, while the attempt lives.

    Args: agent: its name, where the run has several
    """
    await session.execute(_LOCK_OWNER, {"owner": owner})
    held = (await session.execute(_HELD, {"run_id": run_id, "owner": owner, "agent": agent})).first()
    if held is not None:
        return lease_of(held), False
    found = list(await session.scalars(_NEXT, {"run_id": run_id, "agent": agent}))
    leased = await lease_rollouts(session, found, owner, seconds, (EXTERNAL,))
    return (leased[0] if leased else None), bool(leased)


async def lock_attempt(session: Session, run_id: str, lease_id: str) -> AttemptStatus | None:
    """Locks an attempt and returns its status; None where the run has no attempt of this lease."""
    found = (await session.execute(_FIND, {"run_id": run_id, "lease_id": lease_id})).first()
    if found is None:
        return None
    row = (await session.execute(_STATUS, {"lease_id": lease_id})).one()
    outcome = None
    if row.kind is not None:
        kind = OutcomeKind(row.kind)
        outcome = Outcome(kind, row.reward, row.facts, detail=row.detail, stdout_tail=row.stdout_tail)
    seconds = row.seconds or 0.0
    return AttemptStatus(
        lease_of(found), AttemptState(row.state), row.lease_expires_at, row.is_wanted, seconds, outcome
    )


def is_same_end(stored: Outcome, lease: Lease, asked: Outcome) -> bool:
    """Whether an attempt was ended by this request: kind and reward may differ where the platform judged it."""
    row: dict[str, Any] = outcome_row(lease.rollout_id, lease.attempt, lease.run_id, asked)
    texts = (stored.facts, stored.stdout_tail) == (row["facts"], row["stdout_tail"])
    judged = stored.kind in {OutcomeKind.TIMEOUT, OutcomeKind.INFRA_ERROR, OutcomeKind.CANCELLED}
    return texts and (judged or (stored.kind, stored.reward) == (asked.kind, asked.reward))
