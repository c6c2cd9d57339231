"""A trainer's process beside rank 0: computes its share of every step, and knows neither database nor Redis."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from leyden.libs.contracts.weights import weights_sha256
from leyden.libs.faults import fault_point
from leyden.libs.telemetry import logger
from leyden.services.trainer.ranks.collectives import RankFailed, Ranks
from leyden.services.trainer.ranks.messages import Adopt, Compare, Gather, Load, Read, Save, Step
from leyden.services.trainer.settings import Settings
from leyden.services.trainer.state.assembly import make_accelerator, trainer_device
from leyden.services.trainer.state.canaries import read_logprobs
from leyden.services.trainer.state.checkpoints import checkpoint_state
from leyden.services.trainer.state.comparing import NotCompared, read_older_logprobs
from leyden.services.trainer.state.folders import CheckpointDamaged
from leyden.services.trainer.state.resume import restore_learner
from leyden.services.trainer.state.shards import write_shards
from leyden.services.trainer.state.teacher import TeacherDamaged
from leyden.services.trainer.state.versions import adopt_weights, gather_weights
from leyden.services.trainer.step.gradients import Interrupted
from leyden.services.trainer.step.learner import Learner
from leyden.services.trainer.step.step import TrainingDiverged, optimizer_step

log = logger()


async def run_follower(settings: Settings, ranks: Ranks, stop: asyncio.Event) -> None:
    """Obeys rank 0 until it says to leave. `stop` only asks it to: the ranks leave together.

    Raises: RankLost
    """

    async def ask() -> None:
        await stop.wait()
        await asyncio.to_thread(ranks.announce_stop)

    asking = asyncio.create_task(ask())
    try:
        await asyncio.to_thread(_follow, settings, ranks, stop.is_set)
    finally:
        asking.cancel()


def _follow(settings: Settings, ranks: Ranks, asked: Callable[[], bool]) -> None:
    if settings.threads:
        torch.set_num_threads(settings.threads)
    run: tuple[Load, Learner] | None = None
    thread = ThreadPoolExecutor(1, "checkpoint", initializer=os.nice, initargs=(10,))
    while (message := ranks.receive()) is not None:
        try:
            if isinstance(message, Load):
                # Two learners at once may exceed the device's memory.
                run = None
                precision = message.config.computation(trainer_device(settings.device)).precision
                accelerator = make_accelerator(settings.device, precision)
                run = message, restore_learner(message, accelerator, ranks)
            elif isinstance(message, Step) and run is not None:
                fault_point("trainer.follower_step")
                # No local variable but `run` has the learner, which the next one must find gone.
                optimizer_step(
                    run[1], message.samples, run[0].config, zero_variance=message.zero_variance, interrupted=asked
                )
            elif isinstance(message, Gather) and run is not None:
                gather_weights(run[1], message.names)
            elif isinstance(message, Read) and run is not None:
                read_logprobs(run[1], message.token_ids, run[0].config.training.micro_batch_tokens)
            elif isinstance(message, Compare) and run is not None:
                read_older_logprobs(run[1], message, run[0].config)
            elif isinstance(message, Save) and run is not None:
                # Rank 0 waits until all have written, and raises their errors.
                thread.submit(write_shards, checkpoint_state(run[1]), message.folder, ranks)
            elif isinstance(message, Adopt) and run is not None:
                _adopt(run[1], message)
        except (CheckpointDamaged, NotCompared, TeacherDamaged, Interrupted, RankFailed, TrainingDiverged) as error:
            # Rank 0 has raised the same, and decides what follows.
            log.info("message not completed", rank=ranks.rank, cause=str(error))
    thread.shutdown()
    ranks.close()


def _adopt(learner: Learner, message: Adopt) -> None:
    # Ranks with different weights would add up the gradients of different policies, and nothing would notice.
    if weights_sha256(message.weights) != message.content_sha256:
        raise OSError(f"{message.weights}: this process reads other bytes than rank 0: check the storage they share")
    adopt_weights(learner, message.weights)
