"""Resumes a run: from the store's record and the run's files to the learner after the last committed step.

A step is recorded before its checkpoint is written. If a trainer died between the two, the next one makes the step
again from the checkpoint before it and the samples on record, to recompute the optimiser's state. The weights are not
recomputed but read: engines may serve them already. Only where the step's files are damaged or lost are its weights
exported again, and they must be the recorded ones: from its own checkpoint, where that has the weights that the version
rounds, and else from the step made again.

Every file has a hash on record. A step whose files differ is never the start: the newest step before it whose files are
whole is, and the steps after that one are made again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from accelerate import Accelerator

from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.states import ConsumptionVerdict
from leyden.libs.contracts.weights import weights_sha256
from leyden.libs.store import training
from leyden.libs.store.database import Database, ReadSession
from leyden.libs.telemetry import logger
from leyden.services.trainer.model.remedies import naming_settings
from leyden.services.trainer.ranks.collectives import ALONE, Ranks
from leyden.services.trainer.ranks.messages import Adopt, Load, Step
from leyden.services.trainer.rows.batch import Sample
from leyden.services.trainer.rows.progress import Progress
from leyden.services.trainer.rows.reading import read_samples
from leyden.services.trainer.state.assembly import assemble_learner
from leyden.services.trainer.state.folders import DISK_IS_FULL, CheckpointDamaged, LockCheck, VersionDamaged, no_lock
from leyden.services.trainer.state.hints import with_hints
from leyden.services.trainer.state.pruning import prune
from leyden.services.trainer.state.reading import check_checkpoint, read_checkpoint
from leyden.services.trainer.state.saving import begin_checkpoint, save_checkpoint
from leyden.services.trainer.state.teacher import TeacherDamaged, find_teacher, require_teacher
from leyden.services.trainer.state.versions import adopt_weights, export_again
from leyden.services.trainer.step.learner import Learner
from leyden.services.trainer.step.step import optimizer_step

log = logger()


def restore_learner(load: Load, accelerator: Accelerator, ranks: Ranks = ALONE) -> Learner:
    """The learner that a message describes; where it restores a step, it is as it was right after that, and on a CPU
    it continues bit for bit. All ranks call it.

    Raises: CheckpointDamaged: weights or optimiser state are missing or are not what the store recorded, on any rank;
        TeacherDamaged; torch.OutOfMemoryError
    """
    # Models are parts of cycles: the learner of a step gone back on stays on the accelerator until they are collected.
    accelerator.free_memory()
    with naming_settings(load.config, "the learner"):
        if load.teacher is not None:
            with ranks.agreeing_on(TeacherDamaged):
                require_teacher(*load.teacher)
        if load.resumed is None:
            teacher = load.teacher[0] if load.teacher else None
            return assemble_learner(load.base, load.config, accelerator, ranks, load.start, teacher=teacher)
        try:
            return _restored(load, *load.resumed, accelerator, ranks)
        except CheckpointDamaged:
            # The learner of an older step follows: without this `accelerator` holds the model of both.
            accelerator.free_memory()
            raise


def _restored(
    load: Load, weights: Path, checkpoint: Path, expected: Progress, accelerator: Accelerator, ranks: Ranks
) -> Learner:
    with ranks.agreeing_on(CheckpointDamaged):
        if load.from_checkpoint:
            weights = load.start or load.base
        else:
            _require_recorded(weights, expected.content_sha256, VersionDamaged)
        if load.reference is not None and load.reference[1] is not None:
            _require_recorded(load.reference[0], load.reference[1])
        check_checkpoint(checkpoint, expected, ranks)
    with ranks.agreeing_on(CheckpointDamaged):
        reference, teacher = (None if one is None else one[0] for one in (load.reference, load.teacher))
        try:
            learner = assemble_learner(load.base, load.config, accelerator, ranks, weights, reference, teacher)
        # The hash covers the weights alone: transformers reports a damaged config with one of these errors.
        except (OSError, LookupError, TypeError, ValueError) as error:
            raise CheckpointDamaged(f"{weights} cannot be loaded ({error}): restore it from a backup") from error
        read_checkpoint(learner, checkpoint, has_version=not load.from_checkpoint)
        learner.step = expected.step if load.step is None else load.step
        return learner


def _require_recorded(folder: Path, sha256: str, kind: type[CheckpointDamaged] = CheckpointDamaged) -> None:
    """Passes a folder whose weights have this hash. Raises: an error of this kind"""
    if weights_sha256(folder) != sha256:
        raise kind(f"{folder} is lost or not what the store recorded of this version: restore it")


async def recorded_samples(
    session: ReadSession, run_id: str, step: int, config: RunConfig
) -> tuple[list[Sample], list[Sample]]:
    """Returns the samples of a recorded step as the step had them: those that it trained, of its own groups and of
    those that it used again, and those of its groups without variance that the denominators count."""
    verdicts = await training.consumed_groups(session, run_id, step)
    replayed = await training.replayed_groups(session, run_id, step)
    trained = {group for group, verdict in verdicts.items() if verdict is ConsumptionVerdict.TRAINED}
    without_variance = [group for group, verdict in verdicts.items() if verdict is ConsumptionVerdict.NO_VARIANCE]
    # The first of them were replaced by others, which count in their place.
    counted = without_variance[config.sampling.refills :]
    groups = [*trained, *replayed, *counted]
    return await read_samples(session, run_id, groups, trained | set(replayed), config)


def _steps_with_checkpoint(checkpoint: Path, oldest: int, last: int) -> list[int]:
    """The steps of these that have one beside `checkpoint`, newest first, and 0 where only one step was made."""
    steps = [step for step in range(last, max(0, oldest - 1), -1) if checkpoint.with_name(str(step)).is_dir()]
    return [*steps, 0] if last == 1 else steps


@dataclass(frozen=True)
class RecordedRun:
    """A run as the store, its base model and its files have it.

    Args: check_lock: called before a checkpoint is written; start: the weights of version 0, where the run continues
        another one; inherited: that run's checkpoint and its high-water mark, None for a new optimiser
    """

    database: Database
    run_id: str
    config: RunConfig
    base: Path
    accelerator: Accelerator
    check_lock: LockCheck = no_lock
    ranks: Ranks = ALONE
    start: Path | None = None
    inherited: tuple[Path, Progress] | None = None

    @property
    def _first(self) -> Path:
        """The folder of version 0."""
        return self.start or self.base

    async def restore(self, interrupted: Callable[[], bool]) -> Learner:
        """Returns the learner right after the run's last committed step, or of version 0 if no step is committed.

        Args:   interrupted: asked before every pack if a step is made again
        Raises: CheckpointDamaged: files are missing or differ from the store's record; TeacherDamaged: so do those of
            the teacher, and a step is to be made or made again; Interrupted.
        """
        async with self.database.read() as session:
            last = await training.last_committed_step(session, self.run_id)
        if last is None:
            return await self._start()
        checkpoint = Path(last.checkpoint)
        learner = await self._restore_newest(last.number, checkpoint)
        while learner.step < last.number:
            await self.remake_step(learner, checkpoint, interrupted)
        return learner

    async def _restore_newest(self, last: int, checkpoint: Path) -> Learner:
        """Returns the learner right after the newest step whose files are whole: `last`, or one before it.

        Raises: CheckpointDamaged: with the reason of each step that was tried
        """
        oldest, reasons = last - self.config.training.keep_checkpoints, list[str]()
        for step in await asyncio.to_thread(_steps_with_checkpoint, checkpoint, oldest, last):
            try:
                return await self._start() if step == 0 else await self._restore_step(step, checkpoint)
            except CheckpointDamaged as damage:
                reasons.append(str(damage))
                await self._record_damage(step, damage)
        reasons = reasons or [f"{checkpoint} is missing: restore it from a backup"]
        raise CheckpointDamaged(
            f"{'; '.join(reasons)}; step {last} cannot be made again without an older checkpoint: restore one, or"
            " resume the run from an older version"
        )

    async def _restore_step(self, step: int, checkpoint: Path) -> Learner:
        """Args: checkpoint: the folder of any step's"""
        version = await self._version(step)
        expected = Progress(self.run_id, step, version.content_sha256)
        number = self.config.algorithm.reference_version(step)
        reference: tuple[Path, str | None] | None = None
        if number == 0 and step and self.start is None:
            # The base model is no file of this run, and its damage none of a step's.
            reference = self.base, None
        elif number is not None and number != step:
            found = await self._version(number)
            reference = Path(found.path) if number else self._first, found.content_sha256
        resumed = Path(version.path), checkpoint.with_name(str(step)), expected
        load = Load(self.base, self.config, resumed, self.start, reference=reference, teacher=await self._teacher(step))
        try:
            return await asyncio.to_thread(self._restore, load)
        except VersionDamaged as damage:
            if not self._has_rounded_weights:
                raise
            await self._record_damage(step, damage)
        await asyncio.to_thread(self._export_from_checkpoint, load, version)
        return await asyncio.to_thread(self._restore, load)

    @property
    def _has_rounded_weights(self) -> bool:
        """Whether a checkpoint holds the weights that its version rounds."""
        return self.config.training.export_dtype == "bfloat16" and self.config.training.lora is None

    def _export_from_checkpoint(self, load: Load, version: training.Version) -> None:
        """Writes a version whose files are lost from the weights of its checkpoint, which round to it.

        Why not from the step made again: not every device computes a step twice with the same bits.

        Raises: CheckpointDamaged: the checkpoint is damaged, too, or the files written are not the recorded ones
        """
        # This learner computes nothing: it only holds the weights.
        learner = self._restore(replace(load, from_checkpoint=True, reference=None, teacher=None))
        export_again(learner, self.base, version, self.check_lock)

    async def _record_damage(self, step: int, damage: CheckpointDamaged) -> None:
        log.warning("files of a step damaged", step=step, cause=str(damage))
        async with self.database.session() as session:
            await training.record_damage(session, self.run_id, step, str(damage))

    async def _teacher(self, step: int) -> tuple[Path, str | None] | None:
        """The teacher of a learner that is right after `step`; None where no step follows, without distillation, and
        where the policy itself is the teacher."""
        named = self.config.algorithm.distillation
        if step >= self.config.training.steps or named is None:
            return None
        if named.is_own:
            recorded = await self._version(0)
            return (self._first, recorded.content_sha256) if named.weights == "start" else None
        async with self.database.read() as session:
            return await find_teacher(session, self.config)

    async def _start(self) -> Learner:
        """Returns the learner of version 0. Raises: CheckpointDamaged: its weights are not those that were recorded"""
        recorded = await self._version(0)
        await asyncio.to_thread(_require_recorded, self._first, recorded.content_sha256)
        teacher = await self._teacher(0)
        if self.inherited is not None and self.start is not None:
            try:
                resumed = (self.start, *self.inherited)
                load = Load(self.base, self.config, resumed, step=0, teacher=teacher)
                return await asyncio.to_thread(self._restore, load)
            except CheckpointDamaged as error:
                log.warning("optimiser starts anew", cause=str(error))
        load = Load(self.base, self.config, start=self.start, teacher=teacher)
        return await asyncio.to_thread(self._restore, load)

    def _restore(self, load: Load) -> Learner:
        with self.ranks.sending(load):
            return restore_learner(load, self.accelerator, self.ranks)

    async def remake_step(self, learner: Learner, checkpoint: Path, interrupted: Callable[[], bool]) -> None:
        """Makes the next recorded step again, with the samples on record, and writes its missing checkpoint.

        Raises: OSError: it cannot be written; where the disk is full, older files are gone by then
        """
        step = learner.step + 1
        async with self.database.read() as session:
            samples, zero_variance = await recorded_samples(session, self.run_id, step, self.config)
            samples = await with_hints(session, samples, self.config, self.base)
        await asyncio.to_thread(self._make_step, learner, samples, zero_variance, interrupted)
        folder = checkpoint.with_name(str(step))
        version = await self._version(step)
        try:
            await asyncio.to_thread(self._adopt_and_save, learner, version, folder)
        except OSError as error:
            if error.errno in DISK_IS_FULL:
                # The next try has the room of what only waits for this checkpoint to be whole.
                await asyncio.to_thread(self.check_lock)
                await prune(self.database, self.run_id, checkpoint.parents[1], self.config, step, whole=step - 1)
            raise

    def _make_step(
        self,
        learner: Learner,
        samples: list[Sample],
        zero_variance: list[Sample],
        interrupted: Callable[[], bool],
    ) -> None:
        with self.ranks.sending(Step(samples, zero_variance)):
            optimizer_step(learner, samples, self.config, zero_variance=zero_variance, interrupted=interrupted)

    def _adopt_and_save(self, learner: Learner, version: training.Version, checkpoint: Path) -> None:
        """Takes the recorded weights, which engines may serve already, or exports them again; saves the state."""
        weights = Path(version.path)
        if weights_sha256(weights) == version.content_sha256:
            with self.ranks.sending(Adopt(weights, version.content_sha256)):
                difference = adopt_weights(learner, weights)
            log.info("step made again", step=learner.step, largest_difference=difference)
        else:
            export_again(learner, self.base, version, self.check_lock)
        progress = Progress(self.run_id, learner.step, version.content_sha256)
        state, scratch = begin_checkpoint(learner, checkpoint, self.check_lock)
        save_checkpoint(state, progress, checkpoint, self.check_lock, self.ranks, scratch)

    async def _version(self, number: int) -> training.Version:
        async with self.database.read() as session:
            version = await training.read_version(session, self.run_id, number)
        # The step's own transaction wrote its row; a run's first trainer writes version 0.
        assert version is not None
        return version
