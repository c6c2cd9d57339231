"""From what the store and the disk hold to a learner that goes on: at version 0, or right after the last step.

A step is recorded before its checkpoint is written. Where a trainer died between, the step is made again from the
checkpoint before it and the samples that the store says it consumed: that gives the optimiser's state. The weights are
those on record, which engines may serve already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from accelerate import Accelerator

from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.states import ConsumptionVerdict
from leyden.libs.store import tables, training
from leyden.libs.store.database import Database
from leyden.libs.telemetry import logger
from leyden.services.trainer.batch import Sample
from leyden.services.trainer.checkpoint import (
    CheckpointDamaged,
    LockCheck,
    Progress,
    describe,
    no_lock,
    optimizer_state,
    save_checkpoint,
)
from leyden.services.trainer.learner import adopt_weights, resume_learner, start_learner
from leyden.services.trainer.step import Learner, optimizer_step

log = logger()


def decode_sample(row: tables.Sample) -> Sample:
    """A stored row as arrays.

    Raises: ValueError: its columns differ in length or hold numbers that cannot be trained.
    """
    return Sample(
        id=row.id,
        rollout_id=row.rollout_id,
        group_id=row.group_id,
        token_ids=np.frombuffer(row.token_ids, "<i4"),
        mask=np.frombuffer(row.mask, np.uint8).astype(bool),
        generator_logprobs=np.frombuffer(row.generator_logprobs, "<f4"),
        advantages=np.frombuffer(row.advantages, "<f4"),
        temperatures=np.frombuffer(row.temperatures, "<f4"),
        policy_versions=np.frombuffer(row.policy_versions, "<i4"),
    )


def decode_samples(rows: Iterable[tables.Sample], trained: set[str]) -> tuple[list[Sample], list[Sample]]:
    """The samples of the groups that are trained, and those of the others."""
    samples = [decode_sample(row) for row in rows]
    return [one for one in samples if one.group_id in trained], [one for one in samples if one.group_id not in trained]


@dataclass(frozen=True)
class Origin:
    """Where a run's learner comes from: the store's record, the base model, and what computes.

    Args: check_lock: called before a checkpoint is written
    """

    database: Database
    run_id: str
    config: RunConfig
    base: Path
    accelerator: Accelerator
    check_lock: LockCheck = no_lock

    async def learner(self, interrupted: Callable[[], bool]) -> Learner:
        """The learner right after the run's last committed step, or of version 0, which is on record already.

        Args:   interrupted: asked where a step is made again, before every pack
        Raises: CheckpointDamaged: files are missing or are not what the store recorded; Interrupted.
        """
        async with self.database.read() as session:
            last = await training.last_committed_step(session, self.run_id)
        if last is None:
            return await self._after(0, Path())
        checkpoint = Path(last.checkpoint)
        if await asyncio.to_thread(checkpoint.exists):
            return await self._after(last.number, checkpoint)
        before = last.number - 1
        learner = await self._after(before, checkpoint.with_name(str(before)))
        await self._make_again(learner, interrupted)
        await asyncio.to_thread(self._adopt_and_save, learner, await self._version(last.number), checkpoint)
        return learner

    async def _after(self, step: int, checkpoint: Path) -> Learner:
        if step == 0:
            return await asyncio.to_thread(start_learner, self.base, self.config, self.accelerator)
        version = await self._version(step)
        expected = Progress(self.run_id, step, version.content_sha256)
        weights = Path(version.path)
        return await asyncio.to_thread(
            resume_learner, self.base, weights, checkpoint, expected, self.config, self.accelerator
        )

    async def _make_again(self, learner: Learner, interrupted: Callable[[], bool]) -> None:
        """Makes the step after the learner's, with the samples that the store says it consumed."""
        async with self.database.read() as session:
            verdicts = await training.consumed_groups(session, self.run_id, learner.step + 1)
            rows = await training.load_samples(session, self.run_id, list(verdicts))
        trained = {group for group, verdict in verdicts.items() if verdict is ConsumptionVerdict.TRAINED}
        samples, still = decode_samples(rows, trained)
        await asyncio.to_thread(optimizer_step, learner, samples, self.config, still=still, interrupted=interrupted)

    def _adopt_and_save(self, learner: Learner, version: training.Version, checkpoint: Path) -> None:
        weights = Path(version.path)
        if describe(weights).content_sha256 != version.content_sha256:
            raise CheckpointDamaged(
                f"{weights} is not what the store recorded of version {version.version}: restore it"
            )
        difference = adopt_weights(learner, weights)
        progress = Progress(self.run_id, learner.step, version.content_sha256)
        save_checkpoint(optimizer_state(learner.optimizer), progress, checkpoint, self.check_lock)
        log.info("step made again", step=learner.step, largest_difference=difference)

    async def _version(self, number: int) -> training.Version:
        async with self.database.read() as session:
            version = await training.read_version(session, self.run_id, number)
        # Its row was written in the step's own transaction.
        assert version is not None
        return version
