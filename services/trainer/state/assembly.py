"""Assembles a learner from the models of its run's document."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from transformers import PreTrainedModel

from leyden.libs.contracts.config import CPU, Computation, Critic, Device, RunConfig
from leyden.libs.telemetry import logger
from leyden.services.trainer.model.cpu.products import use_fast_products
from leyden.services.trainer.model.experts import hold_experts, router_names
from leyden.services.trainer.model.forward import Policy
from leyden.services.trainer.model.held import hold_frozen
from leyden.services.trainer.model.load import freeze, read_model, read_structure
from leyden.services.trainer.model.lora import adapter_parameters, add_adapters, read_adapter
from leyden.services.trainer.model.sharding import shard
from leyden.services.trainer.model.value_model import ValueModel, require_same_tokens
from leyden.services.trainer.model.weight_files import WeightFiles, place
from leyden.services.trainer.ranks.collectives import ALONE, Ranks
from leyden.services.trainer.state.teacher import TeacherDamaged, unreadable_teacher
from leyden.services.trainer.step.learner import BasePolicy, Learner, Reference, copied
from leyden.services.trainer.step.optimizers import make_optimizer

log = logger()


def runs_on_cpu(device: str) -> bool:
    """Whether `TRAINER_DEVICE` chooses the CPU on this machine."""
    return device == "cpu" or not torch.accelerator.is_available()


def trainer_device(device: str) -> Device:
    """The device that `TRAINER_DEVICE` chooses on this machine."""
    accelerator = None if runs_on_cpu(device) else torch.accelerator.current_accelerator()
    return CPU if accelerator is None else Device(accelerator.type, flex=find_spec("triton") is not None)


def make_accelerator(device: str, precision: str) -> Accelerator:
    """Chooses the device and, on an accelerator, autocast's precision; master weights stay float32.

    On a CPU `cpu.products` rounds to bfloat16 instead of autocast, exactly where the CPU engine does.
    """
    on_cpu = runs_on_cpu(device)
    autocast = precision == "bfloat16" and not on_cpu
    return Accelerator(cpu=on_cpu, mixed_precision="bf16" if autocast else "no")


def assemble_learner(
    base: Path,
    config: RunConfig,
    accelerator: Accelerator,
    ranks: Ranks = ALONE,
    weights: Path | None = None,
    reference: Path | None = None,
    teacher: Path | None = None,
) -> Learner:
    """A learner with a new optimiser.

    Args: weights: of a version, None for the base model's; reference: of the KL reference, None for
        `weights`; teacher: the folder of the teacher, None without one and where the policy itself is it
    Raises: TeacherDamaged: its model cannot be loaded; OSError, LookupError, TypeError, ValueError: another cannot
    """
    weights = weights or base
    model, critic = _trained_model(base, weights, config, accelerator.device), config.algorithm.critic
    shared = critic is not None and critic.trunk == "shared"
    checkpointing = config.training.activation_checkpointing
    policy = Policy(
        model,
        values=shared,
        activation_checkpointing=checkpointing,
        replays=config.training.routing_replay,
        **_kernels(config, accelerator.device),
    )
    place_policy(policy, weights if config.training.lora is None else base, config, accelerator, ranks)
    if ranks.size == 1:
        # Autocast.
        policy = accelerator.prepare_model(policy, evaluation_mode=True)
    values = _value_model(base, critic, config, accelerator, ranks) if critic and critic.trunk == "own" else None
    optimizer = accelerator.prepare_optimizer(make_optimizer(policy, config.optimizer, critic, values))
    found: Reference | None = None
    if config.algorithm.kl_coefficient > 0:
        found = _reference(base, reference or weights, policy, config, accelerator, ranks)
    judge = _judge(base, teacher, policy, config, accelerator, ranks)
    torch.manual_seed(config.sampling.seed)
    dtype = _export_dtype(config, accelerator.device)
    return Learner(
        policy, optimizer, accelerator, found, ranks=ranks, value_model=values, export_dtype=dtype, teacher=judge
    )


def _computation(config: RunConfig, device: torch.device) -> Computation:
    """The settings of a document that the trainer has resolved, or of any other on this device."""
    return config.computation(Device(device.type))


def _export_dtype(config: RunConfig, device: torch.device) -> torch.dtype | None:
    """The type to which versions round the weights; None where they do not."""
    return torch.bfloat16 if _computation(config, device).export_dtype == "bfloat16" else None


def _value_model(base: Path, critic: Critic, config: RunConfig, accelerator: Accelerator, ranks: Ranks) -> ValueModel:
    folder = base if critic.model is None else Path(critic.model)
    require_same_tokens(base, folder)
    model, checkpointing = _read(folder, config, accelerator.device), config.training.activation_checkpointing
    found = ValueModel(model, activation_checkpointing=checkpointing, **_kernels(config, accelerator.device))
    place_policy(found, folder, config, accelerator, ranks)
    return found


def _reference(
    base: Path, weights: Path, policy: Policy, config: RunConfig, accelerator: Accelerator, ranks: Ranks
) -> Reference:
    every = config.algorithm.kl_reference_every
    if not config.training.lora:
        # Another model with the same experts: the KL compares two weights on one path.
        frozen = frozen_policy(weights, config, accelerator, replays=config.training.routing_replay)
        place_policy(frozen, weights, config, accelerator, ranks)
        return Reference(frozen, every, dtype=_export_dtype(config, accelerator.device))
    if every is None and weights == base:
        return Reference(BasePolicy(policy))
    return adapted(base, weights, policy, every)


def adapted(base: Path, weights: Path, policy: Policy, every: int | None = None) -> Reference:
    """The policy with the adapters of another version, which alone are in memory a second time."""
    # Adapters of zeros are the base model.
    own = adapter_parameters(policy.model)
    reference = Reference(policy, every, {name: torch.zeros_like(tensor) for name, tensor in copied(own).items()})
    if weights != base:
        with reference.weights():
            read_adapter(policy.model, weights)
            reference.adapter = copied(own)
    return reference


def _judge(
    base: Path, teacher: Path | None, policy: Policy, config: RunConfig, accelerator: Accelerator, ranks: Ranks
) -> Reference | None:
    named = config.algorithm.distillation
    if named is not None and named.is_own and named.weights == "newest":
        return Reference(policy)
    if named is None or teacher is None:
        return None
    shares = named.is_own and config.training.lora is not None
    with ranks.agreeing_on(TeacherDamaged):
        try:
            if shares:
                return Reference(BasePolicy(policy)) if teacher == base else adapted(base, teacher, policy)
            found = frozen_policy(teacher, config, accelerator, replays=False)
        except (OSError, LookupError, TypeError, ValueError, SafetensorError) as error:
            raise unreadable_teacher(teacher, error) from error
    place_policy(found, teacher, config, accelerator, ranks)
    return Reference(found)


def frozen_policy(
    weights: Path, config: RunConfig, accelerator: Accelerator, *, replays: bool, is_version: bool = False
) -> Policy:
    """A policy that computes log-probabilities alone, before `place_policy`.

    Args: is_version: the weights are a run's version, and lie in memory in bfloat16 where versions are
    """
    model = _opened(weights).requires_grad_(requires_grad=False)
    if is_version and _export_dtype(config, accelerator.device) is not None:
        _hold(model)
    return Policy(
        _with_precision(model, config, accelerator.device),
        replays=replays,
        **_kernels(config, accelerator.device),
    )


def _hold(model: PreTrainedModel) -> None:
    hold_frozen(model, model.get_input_embeddings().weight)
    hold_experts(model)


def _kernels(config: RunConfig, device: torch.device) -> dict[str, Any]:
    return {"kernel": _computation(config, device).attention, "compiled": config.training.compile}


def _trained_model(base: Path, weights: Path, config: RunConfig, device: torch.device) -> PreTrainedModel:
    lora = config.training.lora
    model = _opened(weights if lora is None else base)
    if lora is None:
        freeze(model, [*config.training.frozen, *_frozen_routers(model, config)])
    else:
        torch.manual_seed(config.sampling.seed)
        add_adapters(model, lora, config.training.frozen, base)
        if weights != base:
            read_adapter(model, weights)
        if _computation(config, device).base_dtype == "bfloat16":
            _hold(model)
    return _with_precision(model, config, device)


def _frozen_routers(model: PreTrainedModel, config: RunConfig) -> list[str]:
    """Names of the parameters that `training.router` freezes."""
    routers = router_names(model)
    if config.training.router == "frozen":
        return routers
    if not routers:
        raise ValueError("training.router 'trained': the model has no router: leave the field out")
    return []


def place_policy(policy: Policy, folder: Path, config: RunConfig, accelerator: Accelerator, ranks: Ranks) -> None:
    """Divides a policy among several ranks, and reads its weights from `folder` on the device."""
    device = accelerator.device
    if ranks.size > 1:
        bfloat16 = _computation(config, device).precision == "bfloat16" and device.type != "cpu"
        shard(policy, device, ranks.size, copies=ranks.copies, bfloat16=bfloat16)
    place(policy, WeightFiles(folder), device)


def _read(folder: Path, config: RunConfig, device: torch.device) -> PreTrainedModel:
    return _with_precision(_opened(folder), config, device)


def _opened(folder: Path) -> PreTrainedModel:
    """The model of a folder without its weights, which `place_policy` reads."""
    model = read_structure(folder)
    if WeightFiles(folder).has(model):
        return model
    log.warning("the whole model is read: its files have other names than transformers writes", folder=folder)
    return read_model(folder)


def _with_precision(model: PreTrainedModel, config: RunConfig, device: torch.device) -> PreTrainedModel:
    if device.type == "cpu":
        bfloat16 = _computation(config, device).precision == "bfloat16"
        use_fast_products(model, head=model.get_output_embeddings(), bfloat16=bfloat16)
    return model
