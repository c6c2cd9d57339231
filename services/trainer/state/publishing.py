"""Publishes a run's versions to the object store, and removes those that the run no longer retains.

The version of a step is published before the step is recorded, so that whoever reads the record finds it. A store that
cannot be used stops no run: engines then load the version from the trainer's folder, the step's metrics say so, and the
publisher tries again after the next step and at the next start. After the run's end the controller does.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from prometheus_client import Counter

from leyden.libs.store import training
from leyden.libs.store.database import Database
from leyden.libs.telemetry import logger
from leyden.libs.weights import Damaged, VersionKey
from leyden.services.trainer.settings import Settings

log = logger()

FAILURES = Counter("trainer_publications_failed_total", "Rounds in which the object store did not get what it lacks.")


class Publisher:
    """Publishes for one run; does nothing where no store is set.

    Raises: StoreUnusable: the store's client is not installed
    """

    def __init__(self, settings: Settings, database: Database) -> None:
        self._store = settings.open_weight_store()
        self._run_id, self._database = settings.run_id, database
        self._is_behind = False

    def publish(self, version: int, content_sha256: str, folder: Path) -> dict[str, float]:
        """Publishes a version before its step is recorded; for threads.

        Returns: metrics of the step: the time, and whether the store lacks this version or may lack an earlier one
        """
        if self._store is None:
            return {}
        started, is_behind = time.perf_counter(), self._is_behind
        try:
            self._store.publish(VersionKey(self._run_id, version, content_sha256), folder)
        except (Damaged, OSError) as error:
            self._failed(error)
            is_behind = True
        return {"publish_seconds": time.perf_counter() - started, "publication_failed": float(is_behind)}

    async def reconcile(self, last: int) -> None:
        """Publishes what the store lacks, and removes what the run no longer retains.

        Args: last: the last recorded step; a later version may be in the store already
        """
        if self._store is None:
            return
        async with self._database.read() as session:
            retained = await training.retained_versions(session, self._run_id)
        wanted = {VersionKey(self._run_id, one.version, one.content_sha256): Path(one.path) for one in retained}
        try:
            late = await asyncio.to_thread(self._store.reconcile, self._run_id, wanted, last)
        except (Damaged, OSError) as error:
            self._is_behind = True
            self._failed(error)
            return
        self._is_behind = False
        if late:
            log.info("versions published late", run_id=self._run_id, versions=[key.version for key in late])

    def _failed(self, error: Exception) -> None:
        FAILURES.inc()
        log.warning("versions not published", run_id=self._run_id, cause=str(error))
