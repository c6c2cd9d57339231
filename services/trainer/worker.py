"""The trainer's loop: wait for credited groups, make a step, export weights, commit all of it in one transaction."""

from __future__ import annotations

import asyncio
import errno
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch
from prometheus_client import Counter, Gauge

from leyden.libs.contracts.config import RunConfig, Training
from leyden.libs.faults import fault_point
from leyden.libs.queue.notifications import Notifications, Topic
from leyden.libs.service import Checks, pause
from leyden.libs.store import training
from leyden.libs.store.database import Database, StoreAway
from leyden.libs.store.engines import Pool, pool_of_run
from leyden.libs.store.locks import AdvisoryLock, LockLost
from leyden.libs.telemetry import RateLimitedLogger, logger
from leyden.services.trainer.batch import Sample
from leyden.services.trainer.checkpoint import (
    Export,
    Progress,
    checkpoint_folder,
    clear_scratch,
    copy_version,
    describe,
    version_folder,
)
from leyden.services.trainer.compute import Interrupted
from leyden.services.trainer.learner import compare_at, export_learner, gathered_optimizer, make_accelerator
from leyden.services.trainer.ranks import ALONE, Ranks, Step
from leyden.services.trainer.resume import LearnerLoader, decode_samples, export_again
from leyden.services.trainer.saving import PHASE_SECONDS, Saver, lock_check
from leyden.services.trainer.settings import Settings
from leyden.services.trainer.step import Learner, Metrics, naming_memory_settings, optimizer_step

log = logger()
limited_log = RateLimitedLogger(log)

CLIENT = "leyden-trainer"

STEPS = Counter("trainer_steps_total", "Optimiser steps committed.")
GROUPS = Counter("trainer_groups_total", "Groups consumed or refused, by verdict.", ["verdict"])
TOKENS = Counter("trainer_tokens_total", "Tokens trained.")
STEP_METRIC = Gauge("trainer_step_metric_value", "Metrics of the last step, by name.", ["name"])
LOGPROB_GAP = Gauge("trainer_logprob_gap_nats", "Mean |trainer - engine| log-probability at equal versions.")


class PoliciesDisagree(RuntimeError):
    """Trainer and engine compute different log-probabilities for the same weights: training on would be off-policy."""


def require_agreement(steps: Sequence[Metrics], limits: Training, patience: int) -> None:
    """Refuses the first of `steps` if it and the steps before it, newest first, all show that the policies disagree.

    Args:   steps: those that compared trainer and engine; patience: how many of them must disagree
    Raises: PoliciesDisagree
    """
    if len(steps) < patience or not all(_disagrees(metrics, limits) for metrics in steps[:patience]):
        return
    gap, share = steps[0].get("logprob_gap_mean", math.nan), steps[0]["logprob_gap_sample_share"]
    raise PoliciesDisagree(
        f"log-probabilities of trainer and engine differ by {gap:.2g} on average (training.max_logprob_gap is"
        f" {limits.max_logprob_gap}), with an effective sample size of {share:.0%} (training.min_effective_share is"
        f" {limits.min_effective_share:.0%}), in {patience} steps in a row: check that the engine serves the exported"
        " weights at the same precision"
    )


def _disagrees(metrics: Metrics, limits: Training) -> bool:
    gap, share = metrics.get("logprob_gap_mean", 0.0), metrics["logprob_gap_sample_share"]
    return gap > limits.max_logprob_gap or share < limits.min_effective_share


@dataclass(frozen=True)
class Selection:
    """Group ids by verdict: too old, trained, or consumed untrained because all their advantages are zero.

    `replaced` groups have no variance either; others of the step stand for them. All but `stale` stay empty until a
    step has enough groups.
    """

    stale: list[str]
    trained: list[str]
    zero_variance: list[str]
    replaced: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether a step can be made."""
        return bool(self.trained or self.zero_variance)


def select_groups(
    ready: Sequence[training.ReadyGroup],
    *,
    step: int,
    groups_per_step: int,
    max_lag: int,
    every_group: bool = False,
    refills: int = 0,
) -> Selection:
    """Sorts the ready groups by verdict for step `step` (from 1), which improves version step - 1.

    A group is stale if its oldest token was sampled more than `max_lag` versions before that. With a lag of 1, step 3
    trains tokens of versions 1 and 2 and refuses version 0.

    Args: every_group: trains groups without variance too, since a penalty, whitening or a critic moves them; refills:
        the first groups without variance that do not count as groups of the step
    """
    stale = [
        group.group_id
        for group in ready
        if group.min_policy_version is not None and step - 1 - group.min_policy_version > max_lag
    ]
    usable = [group for group in ready if group.group_id not in set(stale)]
    without_variance = [group.group_id for group in usable if not group.has_variance]
    replaced = set(without_variance[:refills])
    fresh = [group for group in usable if group.group_id not in replaced][:groups_per_step]
    if len(fresh) < groups_per_step:
        return Selection(stale, [], [])
    last = usable.index(fresh[-1])
    passed = [group.group_id for group in usable[:last] if group.group_id in replaced]
    trained = [group.group_id for group in fresh if group.has_variance or every_group]
    zero_variance = [group.group_id for group in fresh if group.group_id not in trained]
    return Selection(stale, trained, zero_variance, passed)


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
    loop = asyncio.get_running_loop()
    try:
        with ranks.beating(lambda: loop.call_soon_threadsafe(stop.set)):
            while not await _train_once(settings, database, notifications, lock, stop, ranks):
                if await pause(stop, settings.poll_seconds):
                    break
    finally:
        await lock.release()
        await notifications.close()
        await database.close()


async def _train_once(
    settings: Settings,
    database: Database,
    notifications: Notifications,
    lock: AdvisoryLock,
    stop: asyncio.Event,
    ranks: Ranks,
) -> bool:
    """Trains from the last committed step. Returns False on a passing failure: call it again.

    Raises: whatever `Trainer.train` raises; OSError: a file cannot be read or written, and waiting does not help
    """
    try:
        if await _acquire(lock, stop):
            trainer = await _open_trainer(settings, database, notifications, lock, stop, ranks)
            await trainer.train(stop)
        return True
    except Interrupted:
        log.info("step given up")
        return True
    except (StoreAway, OSError, LockLost) as error:
        if isinstance(error, OSError) and not _passes(error):
            raise
        limited_log.warning("going back to the last step", cause=str(error))
        await lock.release()
        return False


def _passes(error: OSError) -> bool:
    """Whether waiting helps: a lost connection or a full disk, unlike a missing folder or permission."""
    return isinstance(error, ConnectionError | TimeoutError) or error.errno in {errno.ENOSPC, errno.EDQUOT}


async def _acquire(lock: AdvisoryLock, stop: asyncio.Event) -> bool:
    """Waits for the run's lock. Returns False if `stop` is set first."""
    while not await lock.acquire():
        log.info("waiting for another trainer of the run")
        if await pause(stop, 1.0):
            return False
    return True


async def _open_trainer(
    settings: Settings,
    database: Database,
    notifications: Notifications,
    lock: AdvisoryLock,
    stop: asyncio.Event,
    ranks: Ranks,
) -> Trainer:
    """Records version 0 if it is new, and loads the learner of the last committed step."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    run_id = settings.run_id
    clear_scratch(settings.folder, run_id)
    async with database.read() as session:
        config = await training.read_run_config(session, run_id)
        version_0 = await training.read_version(session, run_id, 0)
        pool = await pool_of_run(session, run_id)
        parent = await training.read_parent(session, run_id)
    base = _base_model(config, pool, settings)
    start = inherited = None
    if parent is not None and Path(parent.version.path) != base:
        start = version_folder(settings.folder.absolute(), run_id, 0)
        if version_0 is None:
            where = Path(parent.version.path), start, parent.version.content_sha256
            await asyncio.to_thread(copy_version, *where, lock_check(lock))
            fault_point("trainer.version_copied")
        inherited = _inherited(parent, config)
    if version_0 is None:
        export = await asyncio.to_thread(describe, start or base)
        async with database.session() as session:
            await training.add_base_version(session, run_id, _version(0, export))
        await notifications.notify(Topic.VERSIONS)
    accelerator = make_accelerator(settings.device, config.training.precision)
    loader = LearnerLoader(database, run_id, config, base, accelerator, lock_check(lock), ranks, start, inherited)
    learner = await loader.load(stop.is_set)
    log.info("learner ready", step=learner.step, device=str(accelerator.device), ranks=ranks.size)
    return Trainer(settings, config, base, database, notifications, lock, learner)


def _inherited(parent: training.Parent, config: RunConfig) -> tuple[Path, Progress] | None:
    """The parent's checkpoint, if it is there and its moments are those of the parameters that this run trains."""
    if parent.checkpoint is None or not Path(parent.checkpoint).is_dir():
        log.warning("optimiser starts anew", cause="the parent's checkpoint is gone", version=parent.version.version)
        return None
    if parent.config.training.frozen != config.training.frozen:
        log.warning("optimiser starts anew", cause="training.frozen has changed")
        return None
    return Path(parent.checkpoint), Progress(parent.run_id, parent.version.version, parent.version.content_sha256)


def _base_model(config: RunConfig, pool: Pool | None, settings: Settings) -> Path:
    """The model folder of the run, of its pool, or of the settings. Raises: ValueError: none names one."""
    named = config.model or (pool and pool.model_path)
    if named:
        return Path(named)
    if settings.model_path is None:
        raise ValueError(
            "the run names no model: set `model` in its document, TRAINER_MODEL_PATH, or its pool's model_path"
        )
    return settings.model_path


def _version(number: int, export: Export) -> training.Version:
    return training.Version(number, str(export.path), export.content_sha256, export.size_bytes)


@dataclass
class Trainer:
    """Makes steps with a run's learner, while `lock` is this process's own."""

    settings: Settings
    config: RunConfig
    base: Path
    database: Database
    notifications: Notifications
    lock: AdvisoryLock
    learner: Learner

    def __post_init__(self) -> None:
        self.saver = Saver(self.settings, self.config.training.keep_checkpoints, self.database, self.lock)
        self._check_lock = lock_check(self.lock)

    async def train(self, stop: asyncio.Event) -> None:
        """Makes steps until the last one is made or `stop` is set.

        Raises: PoliciesDisagree, TrainingDiverged, CheckpointDamaged: the run must not continue like this; LockLost:
            another trainer may have the run
        """
        try:
            while self.learner.step < self.config.training.steps and not stop.is_set():
                self.saver.raise_failure()
                selection = await self._select()
                if not selection.complete:
                    await self._export_lost_version()
                    await self.notifications.wait(Topic.SAMPLES, timeout_seconds=self.settings.poll_seconds)
                    continue
                try:
                    await self._step(selection, stop)
                except Interrupted:
                    # Another rank may have been asked to stop.
                    stop.set()
                    log.info("step given up", step=self.learner.step + 1)
            await self.saver.finish()
        finally:
            await self.saver.close()

    async def _export_lost_version(self) -> None:
        """Exports the newest version again where its folder is gone: the controller moves a damaged one aside."""
        if self.learner.step == 0:
            return
        async with self.database.read() as session:
            version = await training.read_version(session, self.settings.run_id, self.learner.step)
        # The step's own transaction wrote its row.
        assert version is not None
        if not await asyncio.to_thread(Path(version.path).is_dir):
            await asyncio.to_thread(export_again, self.learner, self.base, version, self._check_lock)

    async def _select(self) -> Selection:
        """Reads the credited groups and refuses the stale ones at once."""
        async with self.database.read() as session:
            ready = await training.ready_groups(session, self.settings.run_id)
        sampling = self.config.sampling
        selection = select_groups(
            ready,
            step=self.learner.step + 1,
            groups_per_step=sampling.groups_per_step,
            max_lag=sampling.max_policy_lag,
            every_group=self.config.algorithm.trains_every_row or self.config.credit.baseline.whiten,
            refills=sampling.refills,
        )
        if selection.stale:
            async with self.database.session() as session:
                await training.refuse_stale_groups(session, self.settings.run_id, selection.stale)
            GROUPS.labels("stale").inc(len(selection.stale))
            log.warning("stale groups refused", groups=selection.stale, step=self.learner.step + 1)
        return selection

    async def _step(self, selection: Selection, stop: asyncio.Event) -> None:
        started_at, started = datetime.now(tz=UTC), time.perf_counter()
        async with self.database.read() as session:
            replayed = await training.replayable_groups(
                session, self.settings.run_id, self.learner.step + 1, self.config.sampling
            )
            rows = await training.load_samples(
                session, self.settings.run_id, selection.trained + selection.zero_variance + replayed
            )
        samples, zero_variance = decode_samples(rows, {*selection.trained, *replayed})
        loaded = time.perf_counter()
        metrics, export = await asyncio.to_thread(self._learn, samples, zero_variance, stop.is_set)
        if "logprob_gap_tokens" not in metrics:
            metrics |= await self._compare_older(samples, metrics)
        again = [sample for sample in samples if sample.group_id in replayed]
        metrics |= {
            "groups_replaced": len(selection.replaced),
            "groups_replayed": len(replayed),
            "samples_replayed": len(again),
        }
        metrics = {**metrics, "load_seconds": loaded - started, "step_seconds": time.perf_counter() - started}

        await self._check_gap(metrics)
        await self.lock.check()
        number = self.learner.step
        checkpoint = checkpoint_folder(self.settings.folder, self.settings.run_id, number)
        record = training.StepRecord(
            run_id=self.settings.run_id,
            number=number,
            metrics=metrics,
            checkpoint=str(checkpoint.absolute()),
            started_at=started_at,
            trained_groups=selection.trained,
            zero_variance_groups=selection.zero_variance + selection.replaced,
            sample_ids=[sample.id for sample in samples if sample.group_id not in replayed],
            version=_version(number, export),
        )
        async with self.database.session() as session:
            await training.commit_step(session, record)
            fault_point("trainer.step_written")
            await training.add_replays(session, self.settings.run_id, number, replayed)
            fault_point("trainer.replays_written")
        fault_point("trainer.committed")
        await self.notifications.notify(Topic.VERSIONS)
        await self.saver.finish()
        state = await asyncio.to_thread(gathered_optimizer, self.learner)
        self.saver.save(state, Progress(self.settings.run_id, number, export.content_sha256))
        GROUPS.labels("replayed").inc(len(replayed))
        self._report(metrics, selection)

    async def _compare_older(self, samples: Sequence[Sample], metrics: Metrics) -> Metrics:
        """Compares trainer and engine at the newest version of a step's tokens that are all older than its own.

        If that cannot be done, `logprob_gap_tokens` is 0 and the effective sample size stands for the comparison.
        """
        versions = [int(sample.policy_versions[sample.mask].max()) for sample in samples if sample.mask.any()]
        if not versions:
            return {}
        async with self.database.read() as session:
            version = await training.read_version(session, self.settings.run_id, max(versions))
        if version is not None:
            where = version.version, Path(version.path)
            found = await asyncio.to_thread(compare_at, *where, samples, self.config, self.learner.accelerator)
            if found:
                return found
        return {"logprob_gap_tokens": 0, "logprob_gap_sample_share": metrics["effective_sample_share"]}

    async def _check_gap(self, metrics: Metrics) -> None:
        """Counts over the recorded steps, so that a restart forgives nothing. Raises: PoliciesDisagree"""
        if "logprob_gap_tokens" not in metrics:
            return
        patience = self.settings.gap_patience
        async with self.database.read() as session:
            before = await training.compared_steps(session, self.settings.run_id, patience - 1)
        require_agreement([metrics, *before], self.config.training, patience)

    def _learn(
        self, samples: Sequence[Sample], zero_variance: Sequence[Sample], interrupted: Callable[[], bool]
    ) -> tuple[Metrics, Export]:
        """Runs in a thread: the part of a step that needs no database."""
        # The run's first step reports whether it continues with the moments of another run.
        moments = {"optimizer_inherited": float(bool(self.learner.optimizer.state))} if self.learner.step == 0 else {}
        step = Step(samples, zero_variance)
        with self.learner.ranks.sending(step), naming_memory_settings(self.config.training):
            metrics = optimizer_step(
                self.learner,
                samples,
                self.config,
                zero_variance=zero_variance,
                interrupted=interrupted,
                before_update=lambda: self.learner.ranks.wait(self.saver.is_written),
            )
        started = time.perf_counter()
        folder = version_folder(self.settings.folder.absolute(), self.settings.run_id, self.learner.step)
        export = export_learner(self.learner, self.base, folder, self._check_lock)
        return {**metrics, **moments, "export_seconds": time.perf_counter() - started}, export

    def _report(self, metrics: Metrics, selection: Selection) -> None:
        STEPS.inc()
        TOKENS.inc(metrics["trained_tokens"])
        GROUPS.labels("trained").inc(len(selection.trained))
        GROUPS.labels("no_variance").inc(len(selection.zero_variance))
        GROUPS.labels("replaced").inc(len(selection.replaced))
        for name, value in metrics.items():
            if name.endswith("_seconds"):
                PHASE_SECONDS.labels(name.removesuffix("_seconds")).observe(value)
            else:
                STEP_METRIC.labels(name).set(value)
        if "logprob_gap_mean" in metrics:
            LOGPROB_GAP.set(metrics["logprob_gap_mean"])
        log.info("step committed", step=self.learner.step, **{name: round(value, 6) for name, value in metrics.items()})
