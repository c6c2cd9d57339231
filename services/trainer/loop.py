"""The steps of a run: wait for credited groups, make a step, export weights, commit all of it in one transaction."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from prometheus_client import Counter, Gauge

from leyden.libs.contracts.canary import CPU_TOKENS, SEQUENCE_TOKENS, Canary
from leyden.libs.contracts.config import RunConfig, Sft, Training
from leyden.libs.faults import fault_point
from leyden.libs.queue.notifications import Notifications, Topic
from leyden.libs.store import training
from leyden.libs.store.database import Database
from leyden.libs.store.locks import AdvisoryLock
from leyden.libs.store.runs.canaries import add_canary, has_canary
from leyden.libs.telemetry import logger
from leyden.services.trainer.ranks.messages import Step
from leyden.services.trainer.rows.batch import Sample
from leyden.services.trainer.rows.progress import Progress
from leyden.services.trainer.rows.reading import read_samples
from leyden.services.trainer.rows.selection import Selection, select_demonstrations, select_groups
from leyden.services.trainer.settings import Settings
from leyden.services.trainer.state.canaries import canary_tokens, compute_canary
from leyden.services.trainer.state.comparing import compare_at
from leyden.services.trainer.state.folders import checkpoint_folder, version_folder
from leyden.services.trainer.state.hints import with_hints
from leyden.services.trainer.state.publishing import Publisher
from leyden.services.trainer.state.saving import PHASE_SECONDS, Saver, begin_checkpoint, lock_check
from leyden.services.trainer.state.versions import Export, export_again, export_version
from leyden.services.trainer.step.gradients import Interrupted
from leyden.services.trainer.step.learner import Learner
from leyden.services.trainer.step.metrics import Metrics
from leyden.services.trainer.step.step import optimizer_step

log = logger()

STEPS = Counter("trainer_steps_total", "Optimiser steps committed.")
GROUPS = Counter("trainer_groups_total", "Groups consumed or refused, by verdict.", ["verdict"])
TOKENS = Counter("trainer_tokens_total", "Tokens trained.")
STEP_METRIC = Gauge("trainer_step_metric_value", "Metrics of the last step, by name.", ["name"])
LOGPROB_GAP = Gauge(
    "trainer_logprob_gap_nats",
    "Mean |trainer - engine| log-probability at equal versions; NaN after a step that compared none.",
)


class PoliciesDisagree(RuntimeError):
    """Trainer and engine compute different log-probabilities for the same weights: training on would be off-policy."""


def require_agreement(steps: Sequence[Metrics], limits: Training, patience: int) -> None:
    """Refuses the first of `steps` if it and the steps before it, newest first, all show that the policies disagree.

    A step that compared no token is neither an agreement nor a disagreement: it is no argument, and changes no verdict.

    Args:   steps: those that compared trainer and engine at equal versions; patience: how many of them must disagree
    Raises: PoliciesDisagree
    """
    if len(steps) < patience or not all(_disagrees(metrics, limits) for metrics in steps[:patience]):
        return
    gap, share = steps[0]["logprob_gap_mean"], steps[0]["logprob_gap_sample_share"]
    raise PoliciesDisagree(
        f"log-probabilities of trainer and engine differ by {gap:.2g} on average (training.max_logprob_gap is"
        f" {limits.max_logprob_gap}), with an effective sample size of {share:.0%} (training.min_effective_share is"
        f" {limits.min_effective_share:.0%}), in {patience} steps in a row: check that the engine serves the exported"
        " weights at the same precision"
    )


def _disagrees(metrics: Metrics, limits: Training) -> bool:
    gap, share = metrics["logprob_gap_mean"], metrics["logprob_gap_sample_share"]
    return gap > limits.max_logprob_gap or share < limits.min_effective_share


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
        self._publisher = Publisher(self.settings, self.database)
        parts = self.settings, self.config, self.database, self.lock, self.learner.ranks
        self.saver = Saver(*parts, self._publisher)
        self._check_lock = lock_check(self.lock)
        learner = self.learner
        size = CPU_TOKENS if learner.accelerator.device.type == "cpu" else SEQUENCE_TOKENS
        self._canary_tokens = canary_tokens(self.base, learner.model.config.get_text_config().vocab_size, size)

    async def train(self, stop: asyncio.Event) -> None:
        """Makes steps until the last one is made or `stop` is set.

        Raises: PoliciesDisagree, TrainingDiverged, CheckpointDamaged: the run must not continue like this; LockLost:
            another trainer may have the run
        """
        try:
            await self._add_lacking_canary()
            # A trainer killed right after the last step's checkpoint has removed nothing, and no later step would.
            await self.saver.remove_old(self.learner.step)
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

    async def _add_lacking_canary(self) -> None:
        """Records the canary of the newest version: version 0 is served before its trainer has loaded it."""
        where = self.settings.run_id, self.learner.step
        async with self.database.read() as session:
            if await has_canary(session, *where):
                return
        canary = await asyncio.to_thread(compute_canary, self.learner, self._canary_tokens, self.config)
        if canary is not None:
            async with self.database.session() as session:
                await add_canary(session, *where, canary)

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
        sampling = self.config.sampling
        async with self.database.read() as session:
            ready = await training.ready_groups(session, self.settings.run_id)
            if isinstance(self.config.algorithm, Sft):
                uses = await training.group_uses(session, self.settings.run_id)
                return select_demonstrations(ready, uses, seed=sampling.seed, groups_per_step=sampling.groups_per_step)
        selection = select_groups(
            ready,
            step=self.learner.step + 1,
            groups_per_step=sampling.groups_per_step,
            max_lag=sampling.max_policy_lag,
            every_group=self.config.algorithm.trains_every_group or self.config.credit.baseline.whiten,
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
        replayed, samples, zero_variance = await self._read_samples(selection)
        loaded = time.perf_counter()
        start = dict[str, training.StartTokens]()
        metrics, export, canary = await asyncio.to_thread(
            self._learn, samples, zero_variance, stop.is_set, start.update
        )
        if "logprob_gap_tokens" not in metrics:
            metrics |= await self._compare_older(samples)
        metrics |= {
            "groups_replaced": len(selection.replaced),
            "groups_untrainable": len(selection.untrainable),
            "groups_replayed": len(replayed),
            "samples_replayed": sum(sample.group_id in replayed for sample in samples),
            "load_seconds": loaded - started,
            "step_seconds": time.perf_counter() - started,
        }
        await self._check_gap(metrics)
        await self.lock.check()
        number, run_id = self.learner.step, self.settings.run_id
        record = training.StepRecord(
            run_id=run_id,
            number=number,
            metrics=metrics,
            checkpoint=str(checkpoint_folder(self.settings.folder, run_id, number).absolute()),
            started_at=started_at,
            trained_groups=selection.trained,
            zero_variance_groups=selection.zero_variance + selection.replaced,
            sample_ids=[sample.id for sample in samples if sample.group_id not in replayed],
            version=export.row(number),
            untrainable_groups=selection.untrainable,
            canary=canary,
            start_tokens=start,
        )
        await self._commit(record, replayed)
        await self.saver.finish()
        folder = checkpoint_folder(self.settings.folder, run_id, number)
        state, scratch = await asyncio.to_thread(begin_checkpoint, self.learner, folder, self._check_lock)
        self.saver.save(state, Progress(run_id, number, export.content_sha256), scratch)
        self._report(metrics, selection)

    async def _read_samples(self, selection: Selection) -> tuple[list[str], list[Sample], list[Sample]]:
        """Returns the groups that the step uses again, the samples that train, and those without variance."""
        run_id = self.settings.run_id
        async with self.database.read() as session:
            every_group = self.config.algorithm.learns_without_variance
            replayed = await training.replayable_groups(
                session, run_id, self.learner.step + 1, self.config.sampling, every_group=every_group
            )
            replayed += selection.repeated
            groups = selection.trained + selection.zero_variance + replayed
            trained = {*selection.trained, *replayed}
            samples, zero_variance = await read_samples(session, run_id, groups, trained, self.config)
            return replayed, await with_hints(session, samples, self.config, self.base), zero_variance

    async def _commit(self, record: training.StepRecord, replayed: Sequence[str]) -> None:
        async with self.database.session() as session:
            await training.commit_step(session, record)
            fault_point("trainer.step_written")
            await training.add_replays(session, record.run_id, record.number, replayed)
            fault_point("trainer.replays_written")
        fault_point("trainer.committed")
        await self.notifications.notify(Topic.VERSIONS)

    async def _compare_older(self, samples: Sequence[Sample]) -> Metrics:
        """Compares trainer and engine at the newest version of a step's tokens that are all older than its own.

        If that cannot be done, `logprob_gap_tokens` is 0, which is a warning of the run. Other weights say nothing. No
        version of the run sampled demonstrations.

        Why beside canaries: those compare prompts alone. These tokens show how the engine samples, its
        caches, and what the gateway recorded.
        """
        if isinstance(self.config.algorithm, Sft):
            return {}
        versions = [int(sample.policy_versions[sample.mask].max()) for sample in samples if sample.mask.any()]
        if not versions:
            return {}
        async with self.database.read() as session:
            version = await training.read_version(session, self.settings.run_id, max(versions))
        if version is not None:
            where = version.version, Path(version.path)
            found = await asyncio.to_thread(compare_at, self.learner, self.base, *where, samples, self.config)
            if found:
                return found
        return {"logprob_gap_tokens": 0}

    async def _check_gap(self, metrics: Metrics) -> None:
        """Counts over the recorded steps, so that a restart forgives nothing. Raises: PoliciesDisagree"""
        if not metrics.get("logprob_gap_tokens"):
            return
        patience = self.settings.gap_patience
        async with self.database.read() as session:
            before = await training.compared_steps(session, self.settings.run_id, patience - 1)
        require_agreement([metrics, *before], self.config.training, patience)

    def _learn(
        self,
        samples: Sequence[Sample],
        zero_variance: Sequence[Sample],
        interrupted: Callable[[], bool],
        keep_start: Callable[[dict[str, training.StartTokens]], None],
    ) -> tuple[Metrics, Export, Canary | None]:
        """Runs in a thread: the part of a step that needs no database."""
        # The run's first step reports whether it continues with the moments of another run.
        moments = {"optimizer_inherited": float(bool(self.learner.optimizer.state))} if self.learner.step == 0 else {}
        with self.learner.ranks.sending(Step(samples, zero_variance)):
            metrics = optimizer_step(
                self.learner,
                samples,
                self.config,
                zero_variance=zero_variance,
                interrupted=interrupted,
                is_written=self.saver.is_written,
                keep_start=keep_start,
            )
        started = time.perf_counter()
        folder = version_folder(self.settings.folder.absolute(), self.settings.run_id, self.learner.step)
        export = export_version(self.learner, self.base, folder, self._check_lock)
        exported = time.perf_counter()
        canary = compute_canary(self.learner, self._canary_tokens, self.config)
        seconds = {"export_seconds": exported - started, "canary_seconds": time.perf_counter() - exported}
        seconds |= self._publisher.publish(self.learner.step, export.content_sha256, export.path)
        return {**metrics, **moments, **seconds}, export, canary

    def _report(self, metrics: Metrics, selection: Selection) -> None:
        STEPS.inc()
        TOKENS.inc(metrics["trained_tokens"])
        GROUPS.labels("trained").inc(len(selection.trained))
        GROUPS.labels("no_variance").inc(len(selection.zero_variance))
        GROUPS.labels("untrainable").inc(len(selection.untrainable))
        GROUPS.labels("replaced").inc(len(selection.replaced))
        GROUPS.labels("replayed").inc(metrics["groups_replayed"])
        # A number that this step lacks would stay that of an earlier one.
        STEP_METRIC.clear()
        for name, value in metrics.items():
            if name.endswith("_seconds"):
                PHASE_SECONDS.labels(name.removesuffix("_seconds")).observe(value)
            else:
                STEP_METRIC.labels(name).set(value)
        LOGPROB_GAP.set(metrics.get("logprob_gap_mean", math.nan))
        if not metrics["trainable_tokens"]:
            log.warning("step without a trainable token", step=self.learner.step, groups=selection.untrainable)
        log.info("step committed", step=self.learner.step, **{name: round(value, 6) for name, value in metrics.items()})
