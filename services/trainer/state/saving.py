"""Writes checkpoints: that of a recorded step in the background, before it removes old files.

A thread writes the optimiser's state while the next samples arrive and their gradients are computed. The next update of
weights and moments waits for that thread.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from prometheus_client import Histogram
from torch import Tensor

from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.weights import file_sha256
from leyden.libs.faults import fault_point
from leyden.libs.store.database import Database
from leyden.libs.store.locks import AdvisoryLock
from leyden.libs.telemetry import SECONDS_BUCKETS
from leyden.services.trainer.ranks.collectives import ALONE, Ranks
from leyden.services.trainer.ranks.messages import Save
from leyden.services.trainer.rows.progress import Progress
from leyden.services.trainer.settings import Settings
from leyden.services.trainer.state.checkpoints import MANIFEST_NAME, STATE_NAME, checkpoint_state
from leyden.services.trainer.state.folders import (
    LockCheck,
    checkpoint_folder,
    in_parts,
    named,
    new_scratch,
    no_lock,
    save_tensors,
)
from leyden.services.trainer.state.pruning import prune
from leyden.services.trainer.state.publishing import Publisher
from leyden.services.trainer.state.shards import write_shards
from leyden.services.trainer.step.learner import Learner

PHASE_SECONDS = Histogram("trainer_phase_seconds", "Time of one phase of a step.", ["phase"], buckets=SECONDS_BUCKETS)


def lock_check(lock: AdvisoryLock) -> LockCheck:
    """A check that other threads than the running event loop's may call; it raises LockLost."""
    loop = asyncio.get_running_loop()
    return lambda: asyncio.run_coroutine_threadsafe(lock.check(), loop).result()


def begin_checkpoint(
    learner: Learner, folder: Path, check_lock: LockCheck = no_lock
) -> tuple[dict[str, Tensor], Path | None]:
    """The learner's state, and the scratch folder where the other ranks begin to write theirs, if there are others.

    Rank 0 calls it. It must then give both to `save_checkpoint`: the others wait for it.
    """
    scratch = None
    if learner.ranks.size > 1:
        scratch = new_scratch(folder.absolute(), check_lock)
        with learner.ranks.sending(Save(scratch)):
            pass
    return checkpoint_state(learner), scratch


def save_checkpoint(
    state: Mapping[str, Tensor],
    progress: Progress,
    folder: Path,
    check_lock: LockCheck = no_lock,
    ranks: Ranks = ALONE,
    scratch: Path | None = None,
) -> None:
    """Writes what a resumed trainer needs beside the weights, in files of `FILE_BYTES`, or in those of all ranks.

    Args:   state, scratch: see `begin_checkpoint`
    Raises: OSError: a file of any rank cannot be written; RankLost; whatever `check_lock` raises
    """
    scratch = scratch or new_scratch(folder, check_lock)
    with named(scratch, folder, check_lock, moment="trainer.checkpoint_unnamed"):
        # No pickle: reading a checkpoint runs no code.
        files = write_shards(state, scratch, ranks) if ranks.size > 1 else _write_parts(state, scratch)
        fault_point("trainer.state_written")
        document = {**asdict(progress), "files": files}
        (scratch / MANIFEST_NAME).write_text(json.dumps(document, indent=2) + "\n")


def _write_parts(state: Mapping[str, Tensor], folder: Path) -> dict[str, str]:
    """Returns the hash of each file by its name."""
    files = dict[str, str]()
    for names in in_parts(state):
        file = folder / (f"{len(files)}-{STATE_NAME}" if files else STATE_NAME)
        save_tensors({name: state[name] for name in names}, file)
        files[file.name] = file_sha256(file)
    return files


class Saver:
    """Saves one step after another: writes its checkpoint, then removes old versions and their checkpoints."""

    def __init__(
        self,
        settings: Settings,
        config: RunConfig,
        database: Database,
        lock: AdvisoryLock,
        ranks: Ranks = ALONE,
        publisher: Publisher | None = None,
    ) -> None:
        self._settings, self._config, self._database, self._lock = settings, config, database, lock
        self._check_lock, self._ranks, self._publisher = lock_check(lock), ranks, publisher
        self._delay_seconds = settings.checkpoint_delay_seconds
        if ranks.size > 1:
            # The other ranks have begun, and wait for this one.
            self._delay_seconds = min(self._delay_seconds, settings.rank_timeout_seconds / 2)
        # Niceness is a thread's own on Linux: engines that load the new weights get the processor first.
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=os.nice, initargs=(10,))
        self._written: Future[None] = self._thread.submit(lambda: None)
        self._task: asyncio.Future[None] = asyncio.wrap_future(self._written)
        self._hurry = threading.Event()

    def save(self, state: Mapping[str, Tensor], progress: Progress, scratch: Path | None = None) -> None:
        """Starts to save a step: after `checkpoint_delay_seconds`, or at once when somebody waits for it.

        Args: scratch: see `begin_checkpoint`
        """
        folder = checkpoint_folder(self._settings.folder, progress.run_id, progress.step)
        self._hurry = hurry = threading.Event()

        def write() -> None:
            hurry.wait(self._delay_seconds)
            with PHASE_SECONDS.labels("checkpoint").time():
                save_checkpoint(state, progress, folder, self._check_lock, self._ranks, scratch)

        self._written = written = self._thread.submit(write)
        self._task = asyncio.create_task(self._follow(written, progress.step), name="checkpoint")

    def is_written(self, seconds: float) -> bool:
        """Waits this long until the last step's state is written: the next update changes it in place.

        For other threads. Raises: LockLost; OSError: it could not be written
        """
        self._hurry.set()
        done, _ = futures.wait([self._written], seconds)
        if done:
            self._written.result()
        return bool(done)

    async def finish(self) -> None:
        """Waits until the last step is saved and old files are gone.

        Raises: LockLost: another trainer may have the run; OSError: it could not be written
        """
        self._hurry.set()
        await self._task

    def raise_failure(self) -> None:
        """Raises the error that ended the last step's saving, if one did."""
        if self._task.done():
            self._task.result()

    async def close(self) -> None:
        """Ends the writing thread: it must not meet the next trainer of this process."""
        self._hurry.set()
        await asyncio.gather(self._task, return_exceptions=True)
        # In a thread of its own: the writing thread may be asking this event loop to check the lock.
        await asyncio.to_thread(self._thread.shutdown)

    async def _follow(self, written: Future[None], step: int) -> None:
        await asyncio.wrap_future(written)
        fault_point("trainer.saved")
        await self.remove_old(step)

    async def remove_old(self, step: int) -> None:
        """Removes what the run no longer needs after `step`, whose files are complete: here and in the object store.

        Raises: LockLost: another trainer may have the run
        """
        await self._lock.check()
        folder = self._settings.folder / self._settings.run_id
        await prune(self._database, self._settings.run_id, folder, self._config, step, whole=step)
        if self._publisher is not None:
            await self._publisher.reconcile(step)
