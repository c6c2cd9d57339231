"""Prunes runs that ended more than `CONTROLLER_RETENTION_DAYS` ago, where the operator has set that, and forgets old
answers of the API."""

from __future__ import annotations

from datetime import timedelta

from prometheus_client import Counter

from leyden.libs.store.access import forget_answers
from leyden.libs.store.database import Database, Refused, StoreAway
from leyden.libs.store.runs.actions import ActionRefused
from leyden.libs.store.runs.retention import RecordsInUse, prunable_runs, prune_run
from leyden.libs.telemetry import logger
from leyden.services.controller.settings import Settings
from leyden.services.controller.upkeep.rounds import repeat

log = logger()

PRUNED = Counter("controller_runs_pruned_total", "Runs whose records were dropped because they were old.")
FREED = Counter("controller_pruned_bytes_total", "Bytes that pruning freed on the disk of Postgres.")

POLL_SECONDS = 60.0
ANSWER_LIFE = timedelta(days=7)
"""The age to which answers of the API stay for a repeat of their request: clients repeat one for minutes."""
ANSWERS_AT_ONCE = 1000


async def prune_forever(settings: Settings, database: Database) -> None:
    """Prunes every minute, until cancelled; returns at once where runs never expire."""
    if settings.retention_days is None:
        return
    age, done = timedelta(days=settings.retention_days), set[str]()
    await repeat(lambda: prune_old(database, age, done), POLL_SECONDS, "runs not pruned")


async def prune_old(database: Database, age: timedelta, done: set[str]) -> list[str]:
    """Prunes runs that ended at least so long ago; returns their ids. One that cannot be pruned stops no other.

    Args: done: runs with nothing left to prune, to which this adds
    """
    async with database.read() as session:
        old = await prunable_runs(session, age, done)
    pruned = []
    for run_id in old:
        try:
            freed = await prune_run(database, run_id)
        except (ActionRefused, RecordsInUse, StoreAway, Refused) as error:
            log.warning("run not pruned", run_id=run_id, cause=str(error))
            continue
        done.add(run_id)
        # Pruned before: this call has at most emptied the outputs that a killed one had left.
        if not freed:
            continue
        PRUNED.inc()
        FREED.inc(freed)
        log.info("run pruned", run_id=run_id, freed_bytes=freed)
        pruned.append(run_id)
    return pruned


async def forget_forever(database: Database) -> None:
    """Deletes answers of the API that no client asks for again, every minute, until cancelled."""
    await repeat(lambda: forget_old_answers(database), POLL_SECONDS, "answers not forgotten")


async def forget_old_answers(database: Database) -> None:
    """Deletes answers that are older than `ANSWER_LIFE`, some in each transaction."""
    deleted = ANSWERS_AT_ONCE
    while deleted == ANSWERS_AT_ONCE:
        async with database.session() as session:
            deleted = await forget_answers(session, ANSWER_LIFE, ANSWERS_AT_ONCE)
