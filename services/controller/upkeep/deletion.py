"""Deletes what an administrator deleted: first a run's files, then its rows, so that a repeat finds the rest."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from leyden.libs.store.database import Database, Refused
from leyden.libs.store.locks import AdvisoryLock
from leyden.libs.store.runs import retention
from leyden.libs.store.runs.actions import ActionRefused
from leyden.libs.telemetry import RateLimitedLogger, logger
from leyden.services.controller.settings import Settings
from leyden.services.controller.trainers.process import log_file
from leyden.services.controller.upkeep.rounds import repeat

log = logger()
limited_log = RateLimitedLogger(log)

POLL_SECONDS = 2.0


async def delete_forever(settings: Settings, database: Database) -> None:
    """Deletes marked runs until cancelled."""
    await repeat(lambda: delete_marked(settings, database), POLL_SECONDS, "runs not deleted")


async def delete_marked(settings: Settings, database: Database) -> None:
    """Deletes every marked run that nobody works for any more. One that cannot be deleted stops no other."""
    async with database.read() as session:
        marked = await retention.deletable_runs(session)
    for run_id in marked:
        # A trainer may still be ending: it holds this lock while it writes.
        lock = AdvisoryLock(settings.database_url, f"trainer:{run_id}", answer_seconds=settings.database_answer_seconds)
        try:
            if await lock.acquire():
                await _delete(settings, database, run_id)
        except (OSError, Refused, ActionRefused, retention.RecordsInUse) as error:
            limited_log.warning("run not deleted", run_id=run_id, cause=str(error))
        finally:
            await lock.release()


async def _delete(settings: Settings, database: Database, run_id: str) -> None:
    async with database.read() as session:
        folders = await retention.run_folders(session, run_id)
    folders |= await asyncio.to_thread(_own_folder, settings.trainer_folder, run_id)
    await asyncio.to_thread(_remove, folders, log_file(settings.log_folder, run_id))
    await asyncio.to_thread(_remove_published, settings, run_id)
    await retention.delete_run(database, run_id)
    log.info("run deleted", run_id=run_id, folders=sorted(map(str, folders)))


def _own_folder(root: Path | None, run_id: str) -> set[Path]:
    """The folder of a run below the trainers', which also holds files that no row names; none without one."""
    if root is None:
        return set()
    folder = root.absolute() / run_id
    is_below = folder.is_dir() and folder.resolve().parent == root.resolve()
    return {folder} if is_below else set()


def _remove(folders: Iterable[Path], log_path: Path) -> None:
    """Raises: OSError: something cannot be removed"""
    log_path.unlink(missing_ok=True)
    for folder in folders:
        if not folder.parent.is_dir():
            log.warning("weights of a deleted run stay", folder=str(folder), cause="not on this machine")
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)


def _remove_published(settings: Settings, run_id: str) -> None:
    """Raises: StoreUnusable"""
    if (store := settings.open_weight_store()) is not None:
        store.remove_run(run_id)
