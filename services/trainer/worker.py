"""The trainer's process: holds the run's lock, loads the learner of the last committed step, and trains from there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import torch

from leyden.libs.contracts.config import BrokenDocument, Computation, RunConfig
from leyden.libs.contracts.model_folder import serving_mismatch
from leyden.libs.faults import fault_point
from leyden.libs.queue.notifications import Notifications, Topic
from leyden.libs.service import Checks, pause
from leyden.libs.store import training
from leyden.libs.store.database import Database, StoreAway
from leyden.libs.store.engines import Pool, pool_of_run
from leyden.libs.store.locks import AdvisoryLock, LockLost
from leyden.libs.store.policies import base_models
from leyden.libs.telemetry import RateLimitedLogger, logger
from leyden.services.trainer.loop import Trainer
from leyden.services.trainer.model.families import check_family
from leyden.services.trainer.model.value_model import require_same_tokens
from leyden.services.trainer.ranks.collectives import ALONE, Ranks
from leyden.services.trainer.rows.progress import Progress
from leyden.services.trainer.sender import WeightSender
from leyden.services.trainer.settings import Settings
from leyden.services.trainer.state.assembly import make_accelerator, trainer_device
from leyden.services.trainer.state.folders import DISK_IS_FULL, clear_scratch, version_folder
from leyden.services.trainer.state.hints import HintWriter
from leyden.services.trainer.state.resume import RecordedRun
from leyden.services.trainer.state.saving import lock_check
from leyden.services.trainer.state.teacher import find_teacher
from leyden.services.trainer.state.versions import copy_version, describe
from leyden.services.trainer.step.gradients import Interrupted

log = logger()
limited_log = RateLimitedLogger(log)

CLIENT = "leyden-trainer"
OF_MOMENTS: dict[str, Callable[[RunConfig], object]] = {
    "training.frozen": attrgetter("training.frozen"),
    "training.router": attrgetter("training.router"),
    # Fine-tuning's gradients have another direction and size than those of rewards.
    "algorithm.type": lambda config: config.algorithm.type == "sft",
    # The correction for their beginning assumes one decay for all steps.
    "optimizer.beta1": attrgetter("optimizer.beta1"),
    "optimizer.beta2": attrgetter("optimizer.beta2"),
}
"""The fields on which Adam's moments depend, and how to read them."""


async def run_trainer(settings: Settings, stop: asyncio.Event, checks: Checks, ranks: Ranks = ALONE) -> None:
    """Trains the run until its last step or until `stop` is set; the run's advisory lock admits one trainer.

    SIGTERM leaves an unfinished step uncommitted; the next trainer makes it again with the same result. This process
    does so itself after an outage of Postgres: the lost connection held the lock, and another trainer may have trained.

    Args: ranks: this process is rank 0 of them
    """
    answer_seconds = settings.database_answer_seconds
    database = Database(settings.database_url, CLIENT, answer_seconds=answer_seconds)
    notifications = Notifications(settings.redis_url)
    checks.add("database", database.ping)
    lock = AdvisoryLock(settings.database_url, f"trainer:{settings.run_id}", CLIENT, answer_seconds=answer_seconds)
    leader, loop = _Leader(settings, database, notifications, lock, stop, ranks), asyncio.get_running_loop()
    try:
        with ranks.beating(lambda: loop.call_soon_threadsafe(stop.set)):
            while not await leader.train_once():
                if await pause(stop, settings.poll_seconds):
                    break
    finally:
        await lock.release()
        await notifications.close()
        await database.close()


@dataclass(frozen=True)
class _Leader:
    """This process as rank 0 of `ranks`, and what it holds open."""

    settings: Settings
    database: Database
    notifications: Notifications
    lock: AdvisoryLock
    stop: asyncio.Event
    ranks: Ranks

    async def train_once(self) -> bool:
        """Trains from the last committed step. Returns False on a passing failure: call it again.

        Raises: whatever `Trainer.train` raises; OSError: a file cannot be read or written, and waiting does not help
        """
        try:
            if await self._acquire():
                trainer = await self._open_trainer()
                if trainer is not None:
                    sender = WeightSender(
                        self.settings, self.database, self.notifications, trainer.learner.accelerator.device
                    )
                    async with sender.accepting(self.stop):
                        await trainer.train(self.stop)
            return True
        except Interrupted:
            log.info("step given up")
            return True
        except (StoreAway, OSError, LockLost) as error:
            if isinstance(error, OSError) and not _passes(error):
                raise
            limited_log.warning("going back to the last step", cause=str(error))
            await self.lock.release()
            return False

    async def _acquire(self) -> bool:
        """Waits for the run's lock. Returns False if `stop` is set first."""
        while not await self.lock.acquire():
            log.info("waiting for another trainer of the run")
            if await pause(self.stop, 1.0):
                return False
        return True

    async def _open_trainer(self) -> Trainer | None:
        """Records version 0 if it is new, and loads the learner of the last committed step.

        Returns: None where the run makes no steps: it needs no learner, and its model may be of a kind that none trains
        """
        if self.settings.threads:
            torch.set_num_threads(self.settings.threads)
        run_id = self.settings.run_id
        clear_scratch(self.settings.folder, run_id)
        async with self.database.read() as session:
            config = await training.read_run_config(session, run_id)
            version_0 = await training.read_version(session, run_id, 0)
            pool = await pool_of_run(session, run_id)
            began = (await base_models(session, [run_id])).get(run_id)
            parent = await training.read_parent(session, run_id)
            teacher = await find_teacher(session, config) if version_0 is None and config.training.steps > 0 else None
        base = _base_model(config, pool, self.settings, began or (parent.base if parent else None))
        await asyncio.to_thread(require_served, base, pool, self.settings.model_path)
        # A continued run has a version 0 of its own. Its parent may be deleted once that is recorded.
        copy = version_folder(self.settings.folder.absolute(), run_id, 0)
        start = copy if version_0 is not None and Path(version_0.path) == copy else None
        inherited = None
        if parent is not None and Path(parent.version.path) != base:
            if version_0 is None:
                start = copy
                where = Path(parent.version.path), start, parent.version.content_sha256
                await asyncio.to_thread(copy_version, *where, lock_check(self.lock))
                fault_point("trainer.version_copied")
            inherited = _inherited(parent, config)
        if version_0 is None:
            if config.training.steps > 0:
                await asyncio.to_thread(_check_families, base, config)
                await asyncio.to_thread(_check_teacher, base, teacher, config)
            export = await asyncio.to_thread(describe, start or base)
            async with self.database.session() as session:
                await training.add_base_version(session, run_id, export.row(0), str(base))
            await self.notifications.notify(Topic.VERSIONS)
        if config.training.steps == 0:
            return None
        computation = await self._computation(config)
        config = config.computed_as(computation)
        accelerator = make_accelerator(self.settings.device, computation.precision)
        of_run = (self.database, run_id, config, base, accelerator, lock_check(self.lock), self.ranks)
        loader = RecordedRun(*of_run, start, inherited)
        learner = await loader.restore(self.stop.is_set)
        log.info("learner ready", step=learner.step, device=str(accelerator.device), ranks=self.ranks.size)
        return Trainer(self.settings, config, base, self.database, self.notifications, self.lock, learner)

    async def _computation(self, config: RunConfig) -> Computation:
        """Resolves the settings of the device, or reads what the run's first trainer resolved."""
        here = config.computation(trainer_device(self.settings.device))
        async with self.database.read() as session:
            found = await training.read_computation(session, self.settings.run_id)
        # A recorded run needs no commit: a trainer whose commits lose their answers would try it for ever.
        if found is None or (found.moved_to or found.device) != here.device:
            async with self.database.session() as session:
                found = await training.keep_computation(session, self.settings.run_id, here)
        if found.moved_to is not None:
            log.warning("run moved to another kind of device", resolved_on=found.device, settings=found.words)
        return found


def _passes(error: OSError) -> bool:
    """Whether waiting helps: a lost connection or a full disk, unlike a missing folder or permission."""
    return isinstance(error, ConnectionError | TimeoutError) or error.errno in DISK_IS_FULL


def _check_families(base: Path, config: RunConfig) -> None:
    """Asks of each model that the run's document names whether it can be trained. Raises: UnsupportedModel"""
    critic = config.algorithm.critic
    for folder in dict.fromkeys([base, *([Path(critic.model)] if critic and critic.model else [])]):
        check_family(folder)


def _check_teacher(base: Path, teacher: tuple[Path, str | None] | None, config: RunConfig) -> None:
    """Passes a teacher with the policy's tokens, of a family that trees compute, whose hints the base model's chat
    template renders. Raises: ValueError"""
    named = config.algorithm.distillation
    if named is not None and named.hint is not None:
        HintWriter(base).hint(named.hint)
    if named is None or teacher is None:
        return
    require_same_tokens(base, teacher[0], "algorithm.distillation")
    if named.model is not None and teacher[0] != base:
        check_family(teacher[0])


def _inherited(parent: training.Parent, config: RunConfig) -> tuple[Path, Progress] | None:
    """The parent's checkpoint, if it is there and its moments are those that this run's optimiser would have made."""
    if parent.checkpoint is None or not Path(parent.checkpoint).is_dir():
        log.warning("optimiser starts anew", cause="the parent's checkpoint is gone", version=parent.version.version)
        return None
    if isinstance(parent.config, BrokenDocument):
        log.warning("optimiser starts anew", cause=f"the parent: {parent.config}")
        return None
    changed = [name for name, read in OF_MOMENTS.items() if read(parent.config) != read(config)]
    if changed:
        log.warning("optimiser starts anew", cause=f"{changed[0]} has changed")
        return None
    return Path(parent.checkpoint), Progress(parent.run_id, parent.version.version, parent.version.content_sha256)


def require_served(base: Path, pool: Pool | None, default: Path | None) -> None:
    """Passes a base model that the engines of the run's pool can serve.

    Args:   default: the model of a pool that names none
    Raises: ValueError: they were started with a model that differs in more than weights and chat template
    """
    served = Path(pool.model_path) if pool is not None and pool.model_path else default
    if served is None or served.resolve() == base.resolve():
        return
    if not base.is_dir():
        raise ValueError(f"the run's model {base} is gone: put the folder back, or a link to its new place")
    mismatch = serving_mismatch(served, base)
    if mismatch is None and pool is not None and pool.adapters is not None:
        mismatch = "engines with adapters of several runs keep the weights of their own model"
    if mismatch is not None:
        raise ValueError(
            f"the run's model {base} cannot be served by the engines of its pool, which serve {served}: {mismatch}."
            " Leave `model` out of a new run; where the platform's model has changed since the run began, start the"
            " platform with that one again; or give the model a pool of its own (CONTROLLER_POOLS)"
        )


def _base_model(config: RunConfig, pool: Pool | None, settings: Settings, began: str | None) -> Path:
    """The model folder that the run names or began with, or of its pool, or of the settings.

    Raises: ValueError: none names one
    """
    named = config.model or began or (pool and pool.model_path)
    if named:
        return Path(named)
    if settings.model_path is None:
        raise ValueError(
            "the run names no model: set `model` in its document, TRAINER_MODEL_PATH, or its pool's model_path"
        )
    return settings.model_path
