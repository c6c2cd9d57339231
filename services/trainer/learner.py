"""Brings a learner to life: from the base model before the first step, from the last committed step after it."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import Accelerator

from libs.contracts.config import RunConfig
from services.trainer.checkpoint import CheckpointDamaged, Progress, describe, load_checkpoint
from services.trainer.forward import Policy
from services.trainer.model import freeze, load_model
from services.trainer.products import use_fast_products
from services.trainer.step import Learner, make_optimizer


def make_accelerator(device: str, precision: str) -> Accelerator:
    """Where and how precisely products are computed. Master weights stay float32: bfloat16 means autocast.

    Raises: ValueError: several processes; the loss is not yet split over ranks.
    """
    accelerator = Accelerator(cpu=device == "cpu", mixed_precision="bf16" if precision == "bfloat16" else "no")
    if accelerator.num_processes != 1:
        raise ValueError(f"a run is trained by one process, not {accelerator.num_processes}: start it without torchrun")
    return accelerator


def start_learner(base: Path, config: RunConfig, accelerator: Accelerator) -> Learner:
    """The learner of policy version 0."""
    return _learner(base, base, config, accelerator)


def resume_learner(
    base: Path, weights: Path, checkpoint: Path, expected: Progress, config: RunConfig, accelerator: Accelerator
) -> Learner:
    """The learner as it was right after the step of `expected`; on a CPU it continues bit for bit.

    Raises: CheckpointDamaged: weights or optimiser state are missing or are not what the store recorded.
    """
    if describe(weights).content_sha256 != expected.content_sha256:
        raise CheckpointDamaged(f"{weights} is not what the store recorded of version {expected.step}: restore it")
    learner = _learner(base, weights, config, accelerator)
    load_checkpoint(learner.optimizer, checkpoint, expected)
    learner.step = expected.step
    return learner


def _learner(base: Path, weights: Path, config: RunConfig, accelerator: Accelerator) -> Learner:
    model = load_model(weights)
    freeze(model, config.training.frozen)
    use_fast_products(model)
    policy = Policy(model, activation_checkpointing=config.training.activation_checkpointing)
    policy, optimizer = accelerator.prepare(policy, make_optimizer(policy, config.optimizer))
    reference = None
    if config.algorithm.kl_coefficient > 0:
        frozen_model = load_model(base).requires_grad_(requires_grad=False)
        use_fast_products(frozen_model)
        reference = Policy(frozen_model).to(accelerator.device)
    torch.manual_seed(config.sampling.seed)
    return Learner(policy, optimizer, accelerator, reference)
