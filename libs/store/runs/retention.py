"""Pruning and deletion: one statement drops the records of an ended run; its history stays, or goes as well.

The SQL function `prune_run` drops, atomically, so that a person with `psql` can do the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from sqlalchemy import TextClause, exc, text

from leyden.libs.store.database import Database, ReadSession, Session
from leyden.libs.store.policies import further_policies
from leyden.libs.store.read.runs import UnknownRun
from leyden.libs.store.runs.actions import ActionRefused

TRIES = 6
FIRST_PAUSE_SECONDS = 0.1
OUTPUTS_AT_ONCE = 10_000
ROWS_AT_ONCE = 10_000

_PRUNE = text("SELECT prune_run(:run)")

_EMPTY_OUTPUTS = text("""
    UPDATE outcomes SET stdout_tail = '', stderr_tail = ''
    WHERE (rollout_id, attempt) IN (
        SELECT o.rollout_id, o.attempt FROM outcomes o JOIN run_status s ON s.run_id = o.run_id
        WHERE o.run_id = :run AND s.phase IN ('completed', 'failed', 'cancelled')
            AND (o.stdout_tail <> '' OR o.stderr_tail <> '')
        LIMIT :limit)
    RETURNING 1
""")

_DELETE_ARTIFACTS = text("""
    DELETE FROM artifacts WHERE (rollout_id, attempt, path) IN (
        SELECT a.rollout_id, a.attempt, a.path FROM artifacts a JOIN run_status s ON s.run_id = a.run_id
        WHERE a.run_id = :run AND s.phase IN ('completed', 'failed', 'cancelled') LIMIT :limit)
    RETURNING 1
""")

_PRUNABLE = text("""
    SELECT s.run_id FROM run_status s JOIN policies ON policies.id = s.run_id AND policies.name = ''
    WHERE s.phase IN ('completed', 'failed', 'cancelled') AND s.finished_at < now() - CAST(:age AS interval)
        AND s.run_id <> ALL(:done)
    ORDER BY s.finished_at
""")

# The further policies go first.
_DELETABLE = text("""
    SELECT runs.id FROM runs JOIN policies ON policies.id = runs.id
    WHERE intent = 'deleted' AND NOT EXISTS (
        SELECT FROM attempts WHERE attempts.run_id = runs.id AND state IN ('leased', 'running'))
    AND NOT (policies.name = '' AND EXISTS (
        SELECT FROM policies others WHERE others.run_id = runs.id AND others.id <> runs.id))
    ORDER BY runs.id
""")

_PATHS = text("""
    SELECT path FROM policy_versions WHERE run_id = :run
    UNION ALL SELECT checkpoint FROM steps WHERE run_id = :run
""")

# The order of the foreign keys. The rows of external rewards name their run in the rollout's id alone.
_DELETE_ROWS = [
    text(f"DELETE FROM {table} WHERE ctid = ANY(ARRAY(SELECT ctid FROM {table} WHERE {key} LIMIT :limit)) RETURNING 1")  # noqa: S608  # constants alone
    for table, key in (
        ("external_rewards", "starts_with(rollout_id, CAST(:run AS text) || '.')"),
        *(
            (table, "run_id = :run")
            for table in (
                *(
                    "rollout_rewards",
                    "regrades",
                    "gradings",
                    "feedback",
                    "deliveries",
                    "rewards",
                    "outcomes",
                    "attempts",
                    "group_credits",
                    "agent_names",
                    "step_replays",
                    "step_groups",
                ),
                *("step_samples", "steps", "rollouts", "groups", "evaluations", "policy_versions", "judge_usage"),
                "idempotency_keys",
            )
        ),
    )
]


class RecordsInUse(RuntimeError):
    """Another transaction uses the records of runs for longer than pruning may block others: try again."""


async def prune_run(database: Database, run_id: str, *, tries: int = TRIES) -> int:
    """Drops a run's model calls, spans, credits and samples, and its agents' outputs and files; bytes freed of the
    former.

    The run, its groups, rollouts, attempts, outcomes, rewards, verdicts, steps and versions stay. The partitions of all
    policies go first, in the transaction that checks that they may, then the outputs, some at a time: a run that is not
    pruned has its outputs. A repeat does the rest and frees nothing more. Writers of other runs wait for milliseconds;
    when one of them blocks for longer, pruning gives way and tries again.

    Raises: UnknownRun; ActionRefused: it has not ended, or has an evaluation to do; RecordsInUse
    """
    async with database.read() as session:
        further = await further_policies(session, run_id)
    freed = await _prune_policies(database, run_id, [run_id, *(one.id for one in further.values())], tries)
    for statement in (_EMPTY_OUTPUTS, _DELETE_ARTIFACTS):
        await _repeat(database, statement, run_id, OUTPUTS_AT_ONCE)
    return freed


async def _prune_policies(database: Database, run_id: str, policy_ids: Sequence[str], tries: int) -> int:
    for attempt in range(tries):
        with suppress(RecordsInUse):
            async with database.session() as session:
                return sum([await _drop_partitions(session, run_id, one) for one in policy_ids])
        await asyncio.sleep(FIRST_PAUSE_SECONDS * 2**attempt)
    raise RecordsInUse("the records of runs are in use: try again in a minute")


async def _drop_partitions(session: Session, run_id: str, policy_id: str) -> int:
    try:
        return int(await session.scalar(_PRUNE, {"run": policy_id}) or 0)
    except exc.DBAPIError as error:
        match getattr(error.orig, "sqlstate", None):
            case "P0002":
                raise UnknownRun(f"no run has the id {run_id!r}: list runs to find it") from error
            case "55000":
                message = f"cannot prune run {run_id}: it has not ended, or has an evaluation to do"
                raise ActionRefused(message, []) from error
            case "55P03" | "40P01":
                raise RecordsInUse from error
        raise


async def _repeat(database: Database, statement: TextClause, run_id: str, limit: int) -> None:
    """Executes a statement that changes so many rows at most until it finds fewer, each time in a transaction."""
    changed = limit
    while changed == limit:
        async with database.session() as session:
            changed = len((await session.execute(statement, {"run": run_id, "limit": limit})).all())


async def deletable_runs(session: ReadSession) -> list[str]:
    """Runs that an administrator deleted and whose agents have ended."""
    return list(await session.scalars(_DELETABLE))


async def run_folders(session: ReadSession, run_id: str) -> set[Path]:
    """The folders that hold the run's weights and checkpoints, as their name is the run's id; never the one of its base
    model or of another run."""
    paths = [Path(path) for path in await session.scalars(_PATHS, {"run": run_id})]
    return {path.parents[1] for path in paths if len(path.parents) > 1 and path.parents[1].name == run_id}


async def delete_run(database: Database, run_id: str) -> None:
    """Deletes every row of a run that is marked as deleted, the mark at last: a repeat does the rest.

    Raises: UnknownRun; ActionRefused; RecordsInUse
    """
    await prune_run(database, run_id)
    for statement in _DELETE_ROWS:
        await _repeat(database, statement, run_id, ROWS_AT_ONCE)
    async with database.session() as session:
        await session.execute(text("DELETE FROM run_status WHERE run_id = :run"), {"run": run_id})
        await session.execute(text("DELETE FROM runs WHERE id = :run AND intent = 'deleted'"), {"run": run_id})


async def prunable_runs(session: ReadSession, age: timedelta, done: Collection[str]) -> list[str]:
    """Runs that ended at least so long ago, the longest ended first, without those that are done."""
    return list(await session.scalars(_PRUNABLE, {"age": age, "done": list(done)}))
