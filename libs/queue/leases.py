"""Leases: rows of `attempts`, each one execution of a rollout by one owner, with an expiry, fenced by `lease_id`.

    queued rollout ──lease_rollouts──▶ leased ──start_all──▶ running ──settle_all──▶ settled + outcome
                                         └──────── no heartbeat ────────▶ expired

A rollout is leased again once the controller has excused its attempt and its `rollouts.due_at` has come.
All times are the database's clock, so runners' clocks may differ. Every function runs in the caller's transaction.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import Row, insert, text

from leyden.libs.contracts.config import Agent, BrokenDocument, RunnerConfig
from leyden.libs.contracts.config.agents import stored_agent
from leyden.libs.contracts.states import OutcomeKind
from leyden.libs.faults import fault_point
from leyden.libs.store import tables
from leyden.libs.store.attempts import MAY_RUN, RUNNER_TYPE, AttemptKey
from leyden.libs.store.database import ReadSession, Session
from leyden.libs.store.records.artifacts import Artifact, add_artifacts

DUE = f"{MAY_RUN} AND r.due_at <= clock_timestamp()"
"""SQL: whether rollout r of run u may be leased now."""

# Whether group g of run u is for the caller; null: for any runner.
_OF_TYPE = f"(CAST(:runner_types AS text[]) IS NULL OR {RUNNER_TYPE} = ANY(:runner_types))"

# NO KEY UPDATE: leases of one rollout are serialised, but inserts with a foreign key to the rollout do not wait.
# ORDER BY id: two callers with the same rollouts cannot deadlock.
_LOCK = text("SELECT FROM rollouts WHERE id = ANY(:rollout_ids) ORDER BY id FOR NO KEY UPDATE")

OF_LEASED = """
    SELECT leased.rollout_id, leased.number, leased.run_id, leased.lease_id, leased.lease_expires_at,
           extract(epoch FROM clock_timestamp() - leased.started_at)::float8 AS ran_seconds,
           r.group_id, r.trace_parent, r.greedy, g.dataset_id, g.task_number, g.agent, t.payload,
           u.config,
           jsonb_path_exists(u.config, '$.reward.components[*] ? (@.from == "otlp")') AS takes_feedback
    FROM leased
    JOIN rollouts r ON r.id = leased.rollout_id
    JOIN groups g ON g.id = r.group_id
    JOIN runs u ON u.id = r.run_id
    JOIN tasks t ON t.dataset_id = g.dataset_id AND t.number = g.task_number
"""
"""SQL after `WITH leased AS (…)`: the rows of `lease_of`."""

_LEASE = text(f"""
    WITH leased AS (
        INSERT INTO attempts (rollout_id, number, run_id, state, lease_id, owner, lease_expires_at)
        SELECT r.id, 1 + (SELECT coalesce(max(number), 0) FROM attempts WHERE rollout_id = r.id), r.run_id,
               'leased', asked.lease_id, :owner, clock_timestamp() + make_interval(secs => :seconds)
        FROM unnest(CAST(:rollout_ids AS text[]), CAST(:lease_ids AS text[])) AS asked (rollout_id, lease_id)
        JOIN rollouts r ON r.id = asked.rollout_id
        JOIN groups g ON g.id = r.group_id
        JOIN runs u ON u.id = r.run_id
        WHERE {DUE} AND {_OF_TYPE}
        RETURNING rollout_id, number, run_id, lease_id, lease_expires_at, started_at
    )
    {OF_LEASED}
""")  # noqa: S608  # constants alone

# Owners renew three times per lease time: one who has missed two renewals is gone. A new id fences it off.
_ADOPT = text(f"""
    WITH leased AS (
        UPDATE attempts a SET lease_id = asked.lease_id, owner = :owner,
            lease_expires_at = clock_timestamp() + make_interval(secs => :seconds)
        FROM unnest(CAST(:rollout_ids AS text[]), CAST(:numbers AS integer[]), CAST(:lease_ids AS text[]))
            AS asked (rollout_id, number, lease_id)
        WHERE a.rollout_id = asked.rollout_id AND a.number = asked.number AND a.state = 'running'
            AND a.lease_expires_at BETWEEN clock_timestamp()
                AND clock_timestamp() + make_interval(secs => :seconds / 3.0)
        RETURNING a.rollout_id, a.number, a.run_id, a.lease_id, a.lease_expires_at, a.started_at
    )
    {OF_LEASED}
""")  # noqa: S608  # constants alone

# SKIP LOCKED: a lease that another transaction is settling or renewing is not overdue.
_EXPIRE_OVERDUE = text("""
    UPDATE attempts SET state = 'expired', finished_at = clock_timestamp()
    WHERE (rollout_id, number) IN (
        SELECT rollout_id, number FROM attempts
        WHERE state IN ('leased', 'running') AND lease_expires_at <= clock_timestamp()
        ORDER BY lease_expires_at LIMIT :limit FOR UPDATE SKIP LOCKED)
    RETURNING rollout_id, number, run_id, owner
""")

# Every writer of several attempts locks them in the order of their keys, which prevents deadlocks.
_HEARTBEAT = text("""
    WITH live AS (
        SELECT a.lease_id FROM attempts a JOIN rollouts r ON r.id = a.rollout_id JOIN runs u ON u.id = r.run_id
        WHERE a.lease_id = ANY(:lease_ids) AND a.state IN ('leased', 'running')
            AND r.state = 'queued' AND u.intent <> 'cancelled'
        ORDER BY a.rollout_id, a.number FOR NO KEY UPDATE OF a)
    UPDATE attempts a SET lease_expires_at = clock_timestamp() + make_interval(secs => :seconds)
    FROM live WHERE a.lease_id = live.lease_id
    RETURNING a.lease_id
""")

_LOCK_LIVE = """
        SELECT lease_id FROM attempts WHERE lease_id = ANY(:lease_ids) AND state IN ('leased', 'running')
        ORDER BY rollout_id, number FOR NO KEY UPDATE"""
_START = text(f"""
    WITH live AS ({_LOCK_LIVE})
    UPDATE attempts a SET state = 'running', started_at = coalesce(a.started_at, clock_timestamp())
    FROM live WHERE a.lease_id = live.lease_id
    RETURNING a.lease_id
""")  # noqa: S608  # constants alone

_END = text(f"""
    WITH live AS ({_LOCK_LIVE})
    UPDATE attempts a SET state = 'settled', finished_at = clock_timestamp()
    FROM live WHERE a.lease_id = live.lease_id
    RETURNING a.lease_id, a.rollout_id, a.number, a.run_id
""")  # noqa: S608  # constants alone

_DELIVERABLE = text(f"""
    SELECT r.id FROM rollouts r JOIN groups g ON g.id = r.group_id JOIN runs u ON u.id = r.run_id
    WHERE {DUE} AND {_OF_TYPE}
    ORDER BY r.created_at, r.id LIMIT :limit
""")  # noqa: S608  # constants alone


@dataclass(frozen=True)
class Lease:
    """The right to execute one attempt, with its task and its run's configuration."""

    run_id: str
    group_id: str
    rollout_id: str
    attempt: int
    lease_id: str
    expires_at: datetime
    dataset_id: str
    task_number: int
    task: dict[str, Any]
    """The row of the dataset as uploaded."""
    agent: Agent
    """That of its group, as its runner."""
    runner: RunnerConfig
    trace_parent: str | None
    """W3C trace context of the rollout's creation."""
    began_at: float | None = None
    """When the agent of an adopted one began, of this process's monotonic: its runner is gone."""
    greedy: bool = False
    """Its model calls are decoded greedily."""
    takes_feedback: bool = False
    """Its telemetry gives components of the reward."""
    agent_name: str | None = None
    """In the run's `agents`; None for the agent of a run that has one."""

    @property
    def adopted(self) -> bool:
        """Whether its agent is at work already."""
        return self.began_at is not None


@dataclass(frozen=True)
class Outcome:
    """The end of an attempt, as the runner reports it.

    Raises: ValueError: the reward is not finite, which is the agent's error
    """

    kind: OutcomeKind
    reward: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """The agent's last JSON line."""
    exit_code: int | None = None
    """Negative: killed by that signal."""
    detail: str | None = None
    stdout_tail: str = ""
    stderr_tail: str = ""
    endpoint_down: str | None = None
    """The endpoint that did not answer while the agent ran, where it ended well and printed no reward."""
    gateway_down_at: float | None = None
    """When the gateway last did not answer while the agent ran, or was not watched, where it ended well; of this
    process's monotonic."""
    artifacts: Sequence[Artifact] = ()
    """The files that the run keeps."""
    artifacts_left_out: int = 0
    """Number of the files that `agent.artifacts` names and that are not kept."""

    def __post_init__(self) -> None:
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(f"reward {self.reward} is not finite: settle the attempt as agent_error with this reason")


@dataclass(frozen=True)
class ExpiredAttempt:
    """An attempt whose owner stopped renewing its lease."""

    rollout_id: str
    attempt: int
    run_id: str
    owner: str


async def lease_rollouts(
    session: Session, rollout_ids: Iterable[str], owner: str, seconds: float, runner_types: Sequence[str] | None = None
) -> list[Lease]:
    """Leases the next attempt of each rollout that may be executed, in the order of the ids.

    A rollout may not be executed when its run asks for another type of runner, when it is finished or cancelled, when
    its run is paused or cancelled, before it is due, and while it has an attempt that the controller has not excused,
    which a live one never is. Safe to repeat: one of two callers gets the lease. An attempt whose run's document does
    not parse gets no lease: it ends as the platform's failure with that reason, and the others go on.
    """
    ids = list(dict.fromkeys(rollout_ids))
    if not ids:
        return []
    await session.execute(_LOCK, {"rollout_ids": ids})
    parameters: dict[str, Any] = {"rollout_ids": ids, "lease_ids": [secrets.token_hex(16) for _ in ids]}
    parameters |= {"owner": owner, "seconds": seconds, "runner_types": _listed(runner_types)}
    rows = await session.execute(_LEASE, parameters)
    leased = {lease.rollout_id: lease for lease in await _leased(session, rows)}
    return [leased[rollout_id] for rollout_id in ids if rollout_id in leased]


async def adopt_silent(session: Session, running: Sequence[AttemptKey], owner: str, seconds: float) -> list[Lease]:
    """Leases running attempts whose owner renews them no longer, to one who found their agents at work.

    One whose run's document does not parse ends, as in `lease_rollouts`.
    """
    parameters = {
        "rollout_ids": [one.rollout_id for one in running],
        "numbers": [one.attempt for one in running],
        "lease_ids": [secrets.token_hex(16) for _ in running],
    }
    rows = await session.execute(_ADOPT, {**parameters, "owner": owner, "seconds": seconds})
    return await _leased(session, rows, adopted=True)


async def _leased(session: Session, rows: Iterable[Row[Any]], *, adopted: bool = False) -> list[Lease]:
    leased, broken = [], {}
    for row in rows:
        try:
            leased.append(lease_of(row, adopted=adopted))
        except BrokenDocument as error:
            broken[row.lease_id] = Outcome(OutcomeKind.INFRA_ERROR, detail=str(error))
    await _settle(session, broken)
    return leased


def lease_of(row: Row[Any], *, adopted: bool = False) -> Lease:
    """A row of `OF_LEASED`.

    Raises: BrokenDocument
    """
    played_by = stored_agent(row.config, row.agent)
    return Lease(
        began_at=time.monotonic() - row.ran_seconds if adopted else None,
        run_id=row.run_id,
        group_id=row.group_id,
        rollout_id=row.rollout_id,
        attempt=row.number,
        lease_id=row.lease_id,
        expires_at=row.lease_expires_at,
        dataset_id=row.dataset_id,
        task_number=row.task_number,
        task=row.payload,
        agent=played_by.agent,
        agent_name=played_by.name,
        runner=played_by.runner,
        trace_parent=row.trace_parent,
        greedy=row.greedy,
        takes_feedback=row.takes_feedback,
    )


async def start_all(session: Session, started: Sequence[Lease]) -> set[str]:
    """Sets the attempts to `running`; returns the ids of the leases that are still live. Safe to repeat."""
    if not started:
        return set()
    return set(await session.scalars(_START, {"lease_ids": [lease.lease_id for lease in started]}))


async def lock_all(session: Session, owned: Sequence[Lease]) -> None:
    """Locks attempts for several calls in one transaction, which may then be in any order."""
    await session.execute(text(_LOCK_LIVE), {"lease_ids": [lease.lease_id for lease in owned]})


async def heartbeat_all(session: Session, lease_ids: Iterable[str], seconds: float) -> set[str]:
    """Renews leases in one statement; returns the ids of the renewed ones.

    The caller must stop all others: their leases were lost, or the rollout or its run was cancelled.
    """
    ids = list(lease_ids)
    if not ids:
        return set()
    return set(await session.scalars(_HEARTBEAT, {"lease_ids": ids, "seconds": seconds}))


async def settle_all(session: Session, ended: Sequence[tuple[Lease, Outcome]]) -> set[str]:
    """Ends attempts and writes their outcomes; returns the ids of the leases that were live. Others change nothing.

    Idempotency key: the lease id. A repeat after success finds no lease and writes no second row. Characters and
    numbers that Postgres refuses (NUL, lone surrogates, NaN) are replaced, so every output of an agent can be settled.
    """
    return await _settle(session, {lease.lease_id: outcome for lease, outcome in ended})


async def _settle(session: Session, outcomes: Mapping[str, Outcome]) -> set[str]:
    if not outcomes:
        return set()
    rows = (await session.execute(_END, {"lease_ids": list(outcomes)})).all()
    if not rows:
        return set()
    fault_point("runner.attempt_ended")
    await session.execute(
        insert(tables.Outcome),
        [outcome_row(row.rollout_id, row.number, row.run_id, outcomes[row.lease_id]) for row in rows],
    )
    kept = [(AttemptKey(row.rollout_id, row.number), row.run_id, outcomes[row.lease_id].artifacts) for row in rows]
    await add_artifacts(session, kept)
    return {row.lease_id for row in rows}


def outcome_row(rollout_id: str, attempt: int, run_id: str, outcome: Outcome) -> dict[str, Any]:
    """An outcome as it is stored."""
    return {
        "rollout_id": rollout_id,
        "attempt": attempt,
        "run_id": run_id,
        "kind": outcome.kind,
        "reward": outcome.reward,
        "facts": _storable(outcome.facts),
        "exit_code": outcome.exit_code,
        "detail": _storable(outcome.detail),
        "stdout_tail": _storable(outcome.stdout_tail),
        "stderr_tail": _storable(outcome.stderr_tail),
        "endpoint_down": outcome.endpoint_down,
        # Until this write, which may have waited for the store: readers count back from the attempt's end.
        "gateway_down_seconds": None if (at := outcome.gateway_down_at) is None else time.monotonic() - at,
        "artifacts_left_out": outcome.artifacts_left_out,
    }


async def expire_overdue(session: Session, limit: int = 1000) -> list[ExpiredAttempt]:
    """Ends leases whose owner stopped renewing them, the longest overdue first. Processes may call it at once."""
    rows = await session.execute(_EXPIRE_OVERDUE, {"limit": limit})
    return [ExpiredAttempt(row.rollout_id, row.number, row.run_id, row.owner) for row in rows]


async def deliverable_rollouts(
    session: ReadSession, limit: int = 10_000, *, runner_types: Sequence[str] | None = None
) -> list[str]:
    """Returns the rollouts that `lease_rollouts` would lease now, oldest first: the streams should contain these."""
    return list(await session.scalars(_DELIVERABLE, {"limit": limit, "runner_types": _listed(runner_types)}))


def _listed(runner_types: Sequence[str] | None) -> list[str] | None:
    return None if runner_types is None else list(runner_types)


def _storable(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("\x00", "\ufffd").encode("utf-8", "replace").decode()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {_storable(key): _storable(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_storable(item) for item in value]
    return value
