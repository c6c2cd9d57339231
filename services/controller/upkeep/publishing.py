"""Publishes versions that the object store did not get before the end of their run: no trainer comes back for them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from leyden.libs.store.alarms.events import record_events
from leyden.libs.store.alarms.publications import end_unpublished, ended_unpublished_runs
from leyden.libs.store.database import Database, Refused
from leyden.libs.store.locks import AdvisoryLock
from leyden.libs.store.training import retained_versions
from leyden.libs.telemetry import RateLimitedLogger, logger
from leyden.libs.weights import Damaged, VersionKey, WeightStore
from leyden.services.controller.settings import Settings
from leyden.services.controller.upkeep.rounds import repeat

log = logger()
limited_log = RateLimitedLogger(log)

POLL_SECONDS = 30.0


async def publish_forever(settings: Settings, database: Database) -> None:
    """Publishes twice a minute, until cancelled; returns at once where no object store is set."""
    if settings.weight_store is None:
        return
    damaged = set[str]()
    await repeat(lambda: publish_late(settings, database, damaged), POLL_SECONDS, "versions not published")


async def publish_late(settings: Settings, database: Database, damaged: set[str]) -> None:
    """Publishes what the store lacks of runs that ended with the alarm `not_published`, and ends the alarm.

    One that cannot be published stops no other.

    Args: damaged: runs with a folder that is not what was recorded, which is not read again; a new one is added
    """
    async with database.read() as session:
        runs = [one for one in await ended_unpublished_runs(session) if one not in damaged]
    store = await asyncio.to_thread(settings.open_weight_store) if runs else None
    if store is None:
        return
    for run_id in runs:
        # A trainer may still be ending: it holds this lock while it writes.
        lock = AdvisoryLock(settings.database_url, f"trainer:{run_id}", answer_seconds=settings.database_answer_seconds)
        try:
            if await lock.acquire():
                await _publish(store, database, run_id, with_events=settings.webhook_url is not None)
        except (OSError, Refused) as error:
            limited_log.warning("versions not published", run_id=run_id, cause=str(error))
        except Damaged as error:
            damaged.add(run_id)
            log.error("versions not published", run_id=run_id, cause=str(error))
        finally:
            await lock.release()


async def _publish(store: WeightStore, database: Database, run_id: str, *, with_events: bool) -> None:
    """Raises: StoreUnusable; Damaged; OSError: a file cannot be read"""
    async with database.read() as session:
        retained = await retained_versions(session, run_id)
    wanted = {VersionKey(run_id, one.version, one.content_sha256): Path(one.path) for one in retained}
    late = await asyncio.to_thread(store.reconcile, run_id, wanted)
    async with database.session() as session:
        ended = await end_unpublished(session, run_id)
        if with_events:
            await record_events(session, run_id, ended)
    log.info("versions published late", run_id=run_id, versions=[key.version for key in late])
