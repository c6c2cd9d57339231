"""Publishes a run's versions to the object store, and removes those that the run no longer retains.

The version of a step is published before the step is recorded, so that whoever reads the record finds it. A store that
cannot be used stops no run: engines then load the version from the trainer's folder, and the publisher tries again
after the next step and at the next start.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from prometheus_client import Counter

from leyden.libs.store import training
from leyden.libs.store.database import Database
from leyden.libs.telemetry import logger
from leyden.libs.weights import Damaged, VersionKey
from leyden.services.trainer.settings import Settings
from leyden.services.trainer.state.folders import version_folder

log = logger()

FAILURES = Counter("trainer_publications_failed_total", "Rounds in which the object store did not get what it lacks.")


class Publisher:
    """Publishes for one run; does nothing where no store is set.

    Raises: StoreUnusable: the store's client is not installed
    """

    def __init__(self, settings: Settings, database: Database) -> None:
        self._store = settings.open_weight_store()
        self._run_id, self._root, self._database = settings.run_id, settings.folder.absolute(), database

    def publish(self, version: int, content_sha256: str, folder: Path) -> dict[str, float]:
        """Publishes a version before its step is recorded. Returns the time as a metric of the step; for threads."""
        if self._store is None:
            return {}
        started = time.perf_counter()
        try:
            self._store.publish(VersionKey(self._run_id, version, content_sha256), folder)
        except (Damaged, OSError) as error:
            self._failed(error)
        return {"publish_seconds": time.perf_counter() - started}

    async def reconcile(self, last: int) -> None:
        """Publishes what the store lacks, and removes what the run no longer retains.

        Args: last: the last recorded step; a later version may be in the store already
        """
        if self._store is None:
            return
        async with self._database.read() as session:
            recorded = await training.retained_versions(session, self._run_id)
        try:
            await asyncio.to_thread(self._reconcile, recorded, last)
        except (Damaged, OSError) as error:
            self._failed(error)

    def _reconcile(self, recorded: Sequence[training.Version], last: int) -> None:
        assert self._store is not None
        # Version 0 is mostly the base model, which is not the run's own.
        own = [one for one in recorded if Path(one.path) == version_folder(self._root, self._run_id, one.version)]
        wanted = {VersionKey(self._run_id, one.version, one.content_sha256): Path(one.path) for one in own}
        for key in sorted(wanted, reverse=True):
            if self._store.publish(key, wanted[key]):
                log.info("version published late", version=key.version)
        for key in self._store.versions(self._run_id) - wanted.keys():
            if key.version <= last:
                self._store.remove(key)

    def _failed(self, error: Exception) -> None:
        FAILURES.inc()
        log.warning("versions not published", run_id=self._run_id, cause=str(error))
