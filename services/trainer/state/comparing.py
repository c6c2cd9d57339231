"""Compares trainer and engine at an older version: log-probabilities of tokens that it sampled, by its own weights.

With LoRA the policy has the version's adapters meanwhile. Without it a second model lies in memory, divided among the
ranks as the policy is. The gradients of a step are gone by then, and need more where all weights train. Several ranks
agree before the passes that each of them has memory for its own.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from numpy import float64
from numpy.typing import NDArray
from safetensors import SafetensorError

from leyden.libs.contracts.config import Device, RunConfig
from leyden.libs.contracts.judgements.memory import FULL, HALF, forward_bytes
from leyden.libs.contracts.judgements.shape import Shape
from leyden.libs.telemetry import logger
from leyden.services.trainer.model.forward import Policy
from leyden.services.trainer.model.lora import has_adapters
from leyden.services.trainer.model.remedies import raising_host_memory
from leyden.services.trainer.ranks.messages import Compare
from leyden.services.trainer.rows.batch import Sample, trained_tokens
from leyden.services.trainer.rows.passes import ONE_TOKEN
from leyden.services.trainer.state.assembly import adapted, frozen_policy, place_policy
from leyden.services.trainer.step.gradients import Plan, batch_outputs, plan_batch
from leyden.services.trainer.step.learner import Learner, Reference
from leyden.services.trainer.step.metrics import Metrics, gap_metrics

log = logger()

COMPARED_TOKENS = 512
"""Rows that are computed with an older version's weights end with the one that reaches so many tokens."""


class NotCompared(Exception):
    """A version's weights are gone or cut off, or there is no memory for them or for a pass."""


class UnknownShape(Exception):
    """The sizes of the model are not in its config by the names that are read."""


def compare_at(
    learner: Learner, base: Path, version: int, weights: Path, samples: Sequence[Sample], config: RunConfig
) -> Metrics:
    """`gap_metrics` of tokens that an older version sampled, with that version's weights; of some rows, to be quick.

    Rank 0 calls it. Empty where the weights are gone or cut off, or there is no memory for them or for a pass.
    """
    rows, size = list[Sample](), 0
    for sample in samples:
        if size < COMPARED_TOKENS and (sample.policy_versions[sample.mask] == version).any():
            rows, size = [*rows, sample], size + len(sample.token_ids)
    message, tokens = Compare(base, weights, rows), trained_tokens(rows)
    try:
        with learner.ranks.sending(message):
            logprobs_K = read_older_logprobs(learner, message, config)
    except NotCompared as error:
        log.warning("version not compared with the engine", version=version, cause=str(error))
        return {}
    return gap_metrics(logprobs_K, tokens, tokens.policy_versions_K == version)


def read_older_logprobs(learner: Learner, message: Compare, config: RunConfig) -> NDArray[float64]:
    """The log-probability of each trained token, [K], by the version's weights. All ranks call it.

    Raises: NotCompared: on all ranks, where any of them cannot read the weights or has no room for a pass
    """
    cause = ""
    try:
        with raising_host_memory():
            return _read(learner, message, config)
    except torch.OutOfMemoryError as error:
        if learner.ranks.size > 1:
            # The others are inside a collective.
            raise
        cause = str(error)
    finally:
        # Models are parts of cycles: the next step would find this one in memory.
        gc.collect()
    raise NotCompared(cause)


def _read(learner: Learner, message: Compare, config: RunConfig) -> NDArray[float64]:
    tokens, ranks = trained_tokens(message.samples), learner.ranks
    plan = plan_batch(message.samples, tokens, config.training.micro_batch_tokens, ranks=ranks)
    with _older_policy(learner, message, config, plan) as policy:
        logprobs_K = batch_outputs(policy, plan, len(tokens), learner.accelerator, ranks).logprobs_K
    found: NDArray[float64] = ranks.add(torch.from_numpy(logprobs_K)).numpy()
    return found


@contextmanager
def _older_policy(learner: Learner, message: Compare, config: RunConfig, plan: Plan) -> Iterator[Policy]:
    older: Reference | str | None = None
    try:
        with learner.ranks.agreeing_on(NotCompared):
            older = _older_with_room(learner, message, config, plan)
            if isinstance(older, str):
                raise NotCompared(older)
    except NotCompared:
        # The error has this frame, and the model would stay in memory with it.
        older = None
        raise
    with older.weights() as policy:
        yield policy


def _older_with_room(learner: Learner, message: Compare, config: RunConfig, plan: Plan) -> Reference | str:
    """The version's weights; why they cannot be read or computed with, in words: an error's frames have the model."""
    try:
        with raising_host_memory():
            older = _older(learner, message, config)
            if learner.ranks.size > 1:
                # Inside a pass no rank can say that it lacks memory: the others are in a collective. What is freed here
                # stays with the process.
                torch.empty(_pass_bytes(learner, config, plan), dtype=torch.uint8, device=learner.accelerator.device)
            return older
    except (OSError, SafetensorError, UnknownShape, torch.OutOfMemoryError) as error:
        return str(error)


def _pass_bytes(learner: Learner, config: RunConfig, plan: Plan) -> int:
    """The memory of the plan's passes. Raises: UnknownShape"""
    shape, device = Shape.of(learner.model.config.get_text_config().to_dict()), learner.accelerator.device
    if shape is None:
        raise UnknownShape(
            "the model's config does not tell the memory of a pass: older versions are compared by one process alone"
        )
    found = config.computation(Device(device.type))
    forest = plan.forest
    passes = [ONE_TOKEN, *forest.prefixes, *forest.packs]
    return forward_bytes(
        shape,
        HALF if found.precision == "bfloat16" and device.type != "cpu" else FULL,
        device.type,
        max(map(len, passes)),
        max(one.prefix_tokens for one in passes),
        sum(map(len, forest.prefixes)),
        dense=found.attention == "dense" and device.type != "cpu",
    )


def _older(learner: Learner, message: Compare, config: RunConfig) -> Reference:
    if has_adapters(learner.model):
        return adapted(message.base, message.weights, learner.policy)
    accelerator, replays = learner.accelerator, config.training.routing_replay
    policy = frozen_policy(message.weights, config, accelerator, replays=replays, is_version=True)
    place_policy(policy, message.weights, config, accelerator, learner.ranks)
    return Reference(policy)
