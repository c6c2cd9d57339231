"""Names the settings of a run to change where its trainer has too little memory, or cannot compile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch._dynamo.exc import TorchDynamoException

from leyden.libs.contracts.config import RunConfig

HOST_OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory"
"""Words of torch's RuntimeError."""


class CompilationFailed(RuntimeError):
    """torch.compile could not compile a part of the model: the message names the setting to turn off."""


class HostOutOfMemory(torch.OutOfMemoryError):
    """Memory of the host ran out, and not an accelerator's."""


@contextmanager
def raising_host_memory() -> Iterator[None]:
    """Raises HostOutOfMemory in place of the errors of numpy and torch, which raises a plain RuntimeError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and HOST_OUT_OF_MEMORY not in str(error):
            raise
        raise HostOutOfMemory(str(error)) from error


@contextmanager
def naming_settings(config: RunConfig, work: Literal["the step", "the learner"]) -> Iterator[None]:
    """Names the settings to change where a step, or loading the learner, needs too much memory or cannot be compiled.

    Raises: torch.OutOfMemoryError, HostOutOfMemory, CompilationFailed
    """
    try:
        with raising_host_memory():
            yield
    except TorchDynamoException as error:
        remedy = "training.compile false" if config.training.compile else "training.attention dense"
        raise CompilationFailed(f"torch.compile failed: write {remedy}; {error}") from error
    except torch.OutOfMemoryError as error:
        on_host = isinstance(error, HostOutOfMemory)
        remedies = [*(_smaller_step(config, on_host) if work == "the step" else ()), *_smaller_learner(config, on_host)]
        # Users see the last line of the trainer's output.
        cause = str(error).partition("\n")[0]
        raise type(error)(f"{work} needs too much memory: {', or '.join(remedies)}; {cause}") from error


def _smaller_step(config: RunConfig, on_host: bool) -> Iterator[str]:
    yield f"lower training.micro_batch_tokens ({config.training.micro_batch_tokens})"
    if not config.training.activation_checkpointing:
        yield "set training.activation_checkpointing"
    if config.optimizer.moments != "8bit":
        yield "write optimizer.moments 8bit"
    if not config.optimizer.offload and not on_host:
        yield "set optimizer.offload"


def _smaller_learner(config: RunConfig, on_host: bool) -> Iterator[str]:
    critic = config.algorithm.critic
    if not config.training.lora:
        yield "train adapters with training.lora"
        # Adapters share one model with their reference.
        if config.algorithm.kl_coefficient > 0:
            yield "write algorithm.kl_coefficient 0"
    if critic is not None and critic.trunk == "own":
        yield "write algorithm.critic.trunk shared"
    if on_host:
        yield "give the trainer's machine more memory"
    else:
        yield "divide the model among more GPUs (trainer.gpusPerNode, or torchrun in CONTROLLER_TRAINER_COMMAND)"
    yield "choose a smaller model"
