"""Pruning: one statement drops the records of an ended run; its history stays.

The SQL function `prune_run` drops, atomically, so that a person with `psql` can do the same.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta

from sqlalchemy import exc, text

from leyden.libs.store.database import Database, ReadSession, Session
from leyden.libs.store.runs import ActionRefused, UnknownRun

TRIES = 6
FIRST_PAUSE_SECONDS = 0.1
OUTPUTS_AT_ONCE = 10_000

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

# Without its partition of model calls a run is pruned.
_PRUNABLE = text("""
    SELECT s.run_id FROM run_status s
    WHERE s.phase IN ('completed', 'failed', 'cancelled') AND s.finished_at < now() - CAST(:age AS interval)
        AND to_regclass(format('%I', 'model_calls__' || s.run_id)) IS NOT NULL
    ORDER BY s.finished_at
""")


class RecordsInUse(RuntimeError):
    """Another transaction uses the records of runs for longer than pruning may block others: try again."""


async def prune_run(database: Database, run_id: str, *, tries: int = TRIES) -> int:
    """Drops a run's model calls, spans, credits and samples, and the outputs of its agents; bytes freed of the former.

    The run, its groups, rollouts, attempts, outcomes, rewards, verdicts, steps and versions stay. The outputs go first,
    some at a time, the partitions in one transaction. A repeat does the rest and frees nothing more. Writers of other
    runs wait for milliseconds; when one of them blocks for longer, pruning gives way and tries again.

    Raises: UnknownRun; ActionRefused: it has not ended; RecordsInUse
    """
    await _empty_outputs(database, run_id)
    for attempt in range(tries):
        with suppress(RecordsInUse):
            async with database.session() as session:
                return await _drop_partitions(session, run_id)
        await asyncio.sleep(FIRST_PAUSE_SECONDS * 2**attempt)
    raise RecordsInUse("the records of runs are in use: try again in a minute")


async def _drop_partitions(session: Session, run_id: str) -> int:
    try:
        return int(await session.scalar(_PRUNE, {"run": run_id}) or 0)
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


async def _empty_outputs(database: Database, run_id: str) -> None:
    emptied = OUTPUTS_AT_ONCE
    while emptied == OUTPUTS_AT_ONCE:
        async with database.session() as session:
            emptied = len((await session.execute(_EMPTY_OUTPUTS, {"run": run_id, "limit": OUTPUTS_AT_ONCE})).all())


async def prunable_runs(session: ReadSession, age: timedelta) -> list[str]:
    """Runs that ended at least so long ago and are not pruned, the longest ended first."""
    return list(await session.scalars(_PRUNABLE, {"age": age}))
