"""Loads a learner: from the base model before the first step, from weights and checkpoint after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel

from leyden.libs.contracts.config import Critic, RunConfig
from leyden.libs.telemetry import logger
from leyden.services.trainer.model.cpu.products import use_fast_products
from leyden.services.trainer.model.forward import Policy
from leyden.services.trainer.model.load import freeze, read_model
from leyden.services.trainer.model.lora import adapter_parameters, add_adapters, has_adapters, load_adapter
from leyden.services.trainer.model.remedies import naming_settings, raising_host_memory
from leyden.services.trainer.model.sharding import shard
from leyden.services.trainer.model.tensors import gather, replace_values
from leyden.services.trainer.model.value_model import ValueModel, require_same_tokens
from leyden.services.trainer.ranks.collectives import ALONE, Ranks
from leyden.services.trainer.ranks.messages import Gather, Load, Save
from leyden.services.trainer.rows.batch import Sample, trained_tokens
from leyden.services.trainer.rows.progress import Progress
from leyden.services.trainer.state.checkpoints import (
    CheckpointDamaged,
    Export,
    LockCheck,
    describe,
    export_weights,
    load_checkpoint,
    new_scratch,
    no_lock,
    optimizer_state,
    own_weights,
    parts_of,
)
from leyden.services.trainer.step.gradients import batch_logprobs, plan_batch
from leyden.services.trainer.step.learner import BasePolicy, Learner, Reference, copied
from leyden.services.trainer.step.metrics import Metrics, gap_metrics
from leyden.services.trainer.step.optimizers import make_optimizer

log = logger()

COMPARED_TOKENS = 512
"""Rows that are computed with an older version's weights end with the one that reaches so many tokens."""


def runs_on_cpu(device: str) -> bool:
    """Whether `TRAINER_DEVICE` chooses the CPU on this machine."""
    return device == "cpu" or not torch.accelerator.is_available()


def make_accelerator(device: str, precision: str) -> Accelerator:
    """Chooses the device and, on an accelerator, autocast's precision; master weights stay float32.

    On a CPU `cpu.products` rounds to bfloat16 instead of autocast, exactly where the CPU engine does.
    """
    on_cpu = runs_on_cpu(device)
    autocast = precision == "bfloat16" and not on_cpu
    return Accelerator(cpu=on_cpu, mixed_precision="bf16" if autocast else "no")


def start_learner(
    base: Path, config: RunConfig, accelerator: Accelerator, ranks: Ranks = ALONE, weights: Path | None = None
) -> Learner:
    """The learner of policy version 0: of `weights`, another run's version, or of the base model."""
    return _learner(base, weights or base, config, accelerator, ranks, weights or base)


def resume_learner(
    base: Path,
    weights: Path,
    checkpoint: Path,
    expected: Progress,
    config: RunConfig,
    accelerator: Accelerator,
    ranks: Ranks = ALONE,
    *,
    step: int | None = None,
    reference: tuple[Path, str] | None = None,
) -> Learner:
    """The learner as it was right after the step of `expected`; on a CPU it continues bit for bit.

    Args:   step: counts on from this step; None for that of `expected`; reference: folder and hash of the version that
                is the KL reference, None for `weights`, or without `kl_reference_every`
    Raises: CheckpointDamaged: weights or optimiser state are missing or are not what the store recorded, on any rank.
    """
    with ranks.agreeing_on(CheckpointDamaged):
        for folder, sha256 in ((weights, expected.content_sha256), *((reference,) if reference else ())):
            if describe(folder).content_sha256 != sha256:
                raise CheckpointDamaged(f"{folder} is not what the store recorded of this version: restore it")
    with ranks.agreeing_on(CheckpointDamaged):
        try:
            learner = _learner(base, weights, config, accelerator, ranks, reference[0] if reference else weights)
        # The hash covers the weights alone: transformers reports a damaged config with one of these errors.
        except (OSError, LookupError, TypeError, ValueError) as error:
            raise CheckpointDamaged(f"{weights} cannot be loaded ({error}): restore it from a backup") from error
        weights_of = own_weights(model_of(learner))
        load_checkpoint(learner.optimizer, checkpoint, expected, learner.values, weights_of, ranks)
        learner.step = expected.step if step is None else step
        return learner


def load_learner(load: Load, accelerator: Accelerator, ranks: Ranks) -> Learner:
    """The learner that a message describes. All ranks call it.

    Raises: CheckpointDamaged; torch.OutOfMemoryError; CompilationFailed: several ranks make a pass to shard a model
    """
    with naming_settings(load.config, "the learner"):
        if load.resumed is None:
            return start_learner(load.base, load.config, accelerator, ranks, load.start)
        where = load.base, *load.resumed
        try:
            return resume_learner(*where, load.config, accelerator, ranks, step=load.step, reference=load.reference)
        except CheckpointDamaged:
            # The learner of an older step follows: without this the accelerator holds the model of both.
            accelerator.free_memory()
            raise


def model_of(learner: Learner) -> PreTrainedModel:
    """The learner's model, without the policy around it."""
    model: PreTrainedModel = learner.accelerator.unwrap_model(learner.policy).model
    return model


def compare_at(
    version: int, weights: Path, samples: Sequence[Sample], config: RunConfig, accelerator: Accelerator
) -> Metrics:
    """`gap_metrics` of tokens that an older version sampled, with that version's weights; of some rows, to be quick.

    Empty where the weights are gone or there is no memory for a second model.
    """
    rows, size = list[Sample](), 0
    for sample in samples:
        if size < COMPARED_TOKENS and (sample.policy_versions[sample.mask] == version).any():
            rows, size = [*rows, sample], size + len(sample.token_ids)
    tokens = trained_tokens(rows)
    try:
        with raising_host_memory():
            policy = _frozen(weights, config, accelerator).to(accelerator.device)
            plan = plan_batch(rows, tokens, config.training.micro_batch_tokens)
            logprobs_K = batch_logprobs(policy, plan, len(tokens), accelerator)
    except (OSError, torch.OutOfMemoryError) as error:
        log.warning("version not compared with the engine", version=version, cause=str(error))
        return {}
    return gap_metrics(logprobs_K, tokens, tokens.policy_versions_K == version)


def adopt_weights(learner: Learner, weights: Path) -> float:
    """Copies a version's weights into the learner. Returns the largest change of any weight.

    Weights that round to those of a version in bfloat16 stay as they are.
    """
    if has_adapters(model_of(learner)):
        return load_adapter(model_of(learner), weights)
    own, largest = model_of(learner).state_dict(), 0.0
    for name, loaded in read_model(weights).state_dict().items():
        largest = max(largest, replace_values(own[name], loaded, learner.export_dtype))
    return largest


def export_learner(learner: Learner, base: Path, folder: Path, check_lock: LockCheck = no_lock) -> Export:
    """`export_weights` of the learner's model, from all ranks. Rank 0 calls it."""

    def gathered() -> Iterator[dict[str, Tensor]]:
        for names in parts_of(model_of(learner)):
            with learner.ranks.sending(Gather(names)):
                part = gather_weights(learner, names)
            yield part

    return export_weights(model_of(learner), base, folder, check_lock, parts=gathered(), dtype=learner.export_dtype)


def gather_weights(learner: Learner, names: Sequence[str]) -> dict[str, Tensor]:
    """These weights, complete on rank 0, and nothing on other ranks. All ranks call it.

    They have the type of a version, except adapters and weights that adapters are added to.
    """
    model = model_of(learner)
    own = own_weights(model)
    dtype = None if has_adapters(model) else learner.export_dtype
    return gather({name: own[name] for name in names}, wanted=learner.ranks.rank == 0, dtype=dtype)


def checkpoint_state(learner: Learner) -> dict[str, Tensor]:
    """`optimizer_state` and, where versions round the weights, the weights."""
    rounded = learner.export_dtype is not None and not has_adapters(model_of(learner))
    return optimizer_state(learner.optimizer, learner.values, own_weights(model_of(learner)) if rounded else None)


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


def _learner(
    base: Path, weights: Path, config: RunConfig, accelerator: Accelerator, ranks: Ranks, reference: Path
) -> Learner:
    """Args: reference: the weights of a KL reference that is a version"""
    model, critic = _trained_model(base, weights, config, accelerator.device), config.algorithm.critic
    policy = Policy(
        model,
        activation_checkpointing=config.training.activation_checkpointing,
        values=critic is not None and critic.trunk == "shared",
        kernel=config.training.attention,
        compiled=config.training.compile,
    )
    _place(policy, config, accelerator, ranks)
    if ranks.size == 1:
        # Autocast.
        policy = accelerator.prepare_model(policy, evaluation_mode=True)
    values = _value_model(base, critic, config, accelerator, ranks) if critic and critic.trunk == "own" else None
    optimizer = accelerator.prepare_optimizer(make_optimizer(policy, config.optimizer, critic, values))
    found: Reference | None = None
    if config.algorithm.kl_coefficient > 0:
        found = _reference(base, reference, policy, config, accelerator, ranks)
    torch.manual_seed(config.sampling.seed)
    dtype = _export_dtype(config, accelerator.device)
    return Learner(policy, optimizer, accelerator, found, ranks=ranks, value_model=values, export_dtype=dtype)


def _export_dtype(config: RunConfig, device: torch.device) -> torch.dtype | None:
    """The type to which versions round the weights; None where they do not."""
    # On a CPU bfloat16 rounds the factors of some products and no weights, in trainer and engine alike.
    by_default = config.training.precision if device.type != "cpu" else "float32"
    return torch.bfloat16 if (config.training.export_dtype or by_default) == "bfloat16" else None


def _value_model(base: Path, critic: Critic, config: RunConfig, accelerator: Accelerator, ranks: Ranks) -> ValueModel:
    folder = base if critic.model is None else Path(critic.model)
    require_same_tokens(base, folder)
    found = ValueModel(
        _load(folder, config, accelerator.device),
        activation_checkpointing=config.training.activation_checkpointing,
        kernel=config.training.attention,
        compiled=config.training.compile,
    )
    _place(found, config, accelerator, ranks)
    return found


def _reference(
    base: Path, weights: Path, policy: Policy, config: RunConfig, accelerator: Accelerator, ranks: Ranks
) -> Reference:
    every = config.algorithm.kl_reference_every
    if not config.training.lora:
        frozen = _frozen(base if every is None else weights, config, accelerator)
        _place(frozen, config, accelerator, ranks)
        return Reference(frozen, every, dtype=_export_dtype(config, accelerator.device))
    if every is None:
        return Reference(BasePolicy(policy))
    # Adapters of zeros are the base model.
    own = adapter_parameters(policy.model)
    reference = Reference(policy, every, {name: torch.zeros_like(tensor) for name, tensor in copied(own).items()})
    if weights != base:
        with reference.weights():
            load_adapter(policy.model, weights)
            reference.adapter = copied(own)
    return reference


def _frozen(weights: Path, config: RunConfig, accelerator: Accelerator) -> Policy:
    """A policy that computes log-probabilities alone, in host memory."""
    model = _load(weights, config, accelerator.device).requires_grad_(requires_grad=False)
    return Policy(model, kernel=config.training.attention, compiled=config.training.compile)


def _trained_model(base: Path, weights: Path, config: RunConfig, device: torch.device) -> PreTrainedModel:
    lora = config.training.lora
    model = read_model(weights if lora is None else base)
    if lora is None:
        freeze(model, config.training.frozen)
    else:
        torch.manual_seed(config.sampling.seed)
        add_adapters(model, lora, config.training.frozen, base)
        if weights != base:
            load_adapter(model, weights)
    return _with_precision(model, config, device)


def _place(policy: Policy, config: RunConfig, accelerator: Accelerator, ranks: Ranks) -> None:
    """Moves a policy from host memory to the device; of several ranks' devices, each gets its shards alone."""
    if ranks.size == 1:
        policy.to(accelerator.device)
    else:
        bfloat16 = config.training.precision == "bfloat16" and accelerator.device.type != "cpu"
        shard(policy, accelerator.device, ranks.size, bfloat16=bfloat16)


def _load(folder: Path, config: RunConfig, device: torch.device) -> PreTrainedModel:
    return _with_precision(read_model(folder), config, device)


def _with_precision(model: PreTrainedModel, config: RunConfig, device: torch.device) -> PreTrainedModel:
    if device.type == "cpu":
        use_fast_products(model, head=model.get_output_embeddings(), bfloat16=config.training.precision == "bfloat16")
    return model
