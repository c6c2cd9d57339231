"""What is written after a step, while nobody waits: its checkpoint, and room for the next export; old files go.

The optimiser's state is written while the next samples come and their gradients are computed; the next update of
weights and moments waits for it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from prometheus_client import Histogram

from leyden.libs.contracts.config import RunConfig
from leyden.libs.faults import fault_point
from leyden.libs.store import training
from leyden.libs.store.database import Database
from leyden.libs.store.locks import AdvisoryLock, LockLost
from leyden.libs.telemetry import SECONDS_BUCKETS
from leyden.services.trainer.checkpoint import (
    Progress,
    checkpoint_folder,
    optimizer_state,
    release_reserved,
    remove_folder,
    reserve_export,
    save_checkpoint,
    version_folder,
)
from leyden.services.trainer.learner import model_of
from leyden.services.trainer.settings import Settings
from leyden.services.trainer.step import Learner

PHASE_SECONDS = Histogram("trainer_phase_seconds", "Time of one phase of a step.", ["phase"], buckets=SECONDS_BUCKETS)


def holding(lock: AdvisoryLock) -> Callable[[], None]:
    """For threads other than the running event loop's: raises LockLost where another trainer may have the run."""
    loop = asyncio.get_running_loop()
    return lambda: asyncio.run_coroutine_threadsafe(lock.check(), loop).result()


class Saver:
    """Saves what the learner of a run has after a step, one step at a time."""

    def __init__(
        self, settings: Settings, config: RunConfig, database: Database, lock: AdvisoryLock, learner: Learner
    ) -> None:
        self._settings, self._config, self._database, self._lock = settings, config, database, lock
        self._learner = learner
        self._holding = holding(lock)
        # On Linux a thread's own: whoever serves the new weights goes first.
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=os.nice, initargs=(10,))
        self._saved: Future[None] = self._thread.submit(lambda: None)
        self._hurry = threading.Event()
        self._work: asyncio.Future[None] = asyncio.create_task(self._reserve(), name="reserve")

    def save(self, progress: Progress) -> None:
        """Has the optimiser's state written in a while, and then old files removed."""
        folder = checkpoint_folder(self._settings.folder, progress.run_id, progress.step)
        state = optimizer_state(self._learner.optimizer)
        self._hurry = hurry = threading.Event()

        def write() -> None:
            # Engines read the new weights now, and compute by them what is in flight.
            hurry.wait(self._settings.checkpoint_delay_seconds)
            with PHASE_SECONDS.labels("checkpoint").time():
                save_checkpoint(state, progress, folder, self._holding)

        self._saved = saved = self._thread.submit(write)
        self._work = asyncio.create_task(self._follow(saved, progress.step), name="checkpoint")

    def finish_saving(self) -> None:
        """Waits for the state that is being written, or will be: it changes with the update. For threads.

        Raises: LockLost; OSError: it could not be written
        """
        self._hurry.set()
        self._saved.result()

    async def finish(self) -> None:
        """Waits for everything that is to be saved; nothing is put off.

        Raises: LockLost: another trainer may have the run; OSError: it could not be written
        """
        self._hurry.set()
        await self._work

    def raise_failure(self) -> None:
        """Raises what went wrong since the last step, if anything did."""
        if self._work.done():
            self._work.result()

    async def close(self) -> None:
        """Ends what still writes: it must not meet the next trainer of this process."""
        self._hurry.set()
        await asyncio.gather(self._work, return_exceptions=True)
        # The thread may be asking this loop whether the lock is held.
        await asyncio.to_thread(self._thread.shutdown)
        # Another trainer's room is its own.
        with suppress(LockLost):
            await self._lock.check()
            release_reserved(self._next)

    async def _follow(self, saved: Future[None], step: int) -> None:
        await asyncio.wrap_future(saved)
        fault_point("trainer.saved")
        await self._lock.check()
        await self._prune(step)
        await self._reserve()

    @property
    def _next(self) -> Path:
        return version_folder(self._settings.folder.absolute(), self._settings.run_id, 0)

    async def _reserve(self) -> None:
        """Makes room for the next export while there is time."""
        if self._learner.step >= self._config.training.steps:
            return
        await self._lock.check()
        try:
            await asyncio.to_thread(reserve_export, model_of(self._learner), self._next)
        except OSError:
            # Whoever has the run now clears what is half-written.
            await self._lock.check()
            raise

    async def _prune(self, step: int) -> None:
        """Removes old files, a killed trainer's too: rows are marked first, so that nobody reads what is going.

        The version and the checkpoint before `step` go only now that its own are whole: it could be made again.
        """
        oldest_kept = step - self._config.training.keep_checkpoints + 1
        folder, run_id = self._settings.folder, self._settings.run_id
        async with self._database.session() as session:
            kept = await training.prune_versions(session, run_id, oldest_kept)
        fault_point("trainer.versions_marked")
        folders = [version_folder(folder, run_id, old) for old in _numbers(folder / run_id / "versions") - kept]
        folders += [checkpoint_folder(folder, run_id, old) for old in _numbers(folder / run_id / "checkpoints")]
        for found in folders:
            if int(found.name) < oldest_kept:
                await asyncio.to_thread(remove_folder, found)


def _numbers(parent: Path) -> set[int]:
    return {int(found.name) for found in parent.iterdir() if found.name.isdecimal()}
