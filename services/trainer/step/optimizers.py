"""AdamW over a policy, its learning rate, and AdamW in less memory: moments in 2 bytes or 1, or in host memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, assert_never

import torch
from torch import Tensor

from leyden.libs.contracts.config import Critic, Optimizer
from leyden.services.trainer.model.forward import Policy
from leyden.services.trainer.model.tensors import dequantize_shards, quantize_shards

SCALES = "_scales"
SIGNED = {"exp_avg"}
"""The moment that has a sign; the other one is never negative."""
LEAST_VALUES, LEAST_ROW = 4096, 64
"""Parameters with fewer values, or with fewer in a row, retain moments of their own type under `moments: 8bit`."""


def make_optimizer(
    policy: Policy, config: Optimizer, critic: Critic | None = None, value_model: Policy | None = None
) -> torch.optim.AdamW:
    """AdamW over the parameters that are not frozen, and after them over the critic's: its head, then its model.

    `scale` of a group is its rate as a multiple of the step's. AdamW couples no two parameters, so a group learns as
    under an optimiser of its own.
    """
    trained = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [{"params": trained, "scale": 1.0}]
    head = policy.value_head if value_model is None else value_model.value_head
    if critic is not None and head is not None:
        groups.append({"params": list(head.parameters()), "scale": critic.learning_rate / config.rate})
    if critic is not None and value_model is not None:
        rate = critic.trunk_learning_rate or config.rate
        groups.append({"params": list(value_model.model.parameters()), "scale": rate / config.rate})
    options: dict[str, Any] = {
        "lr": config.rate,
        "betas": (config.beta1, config.beta2),
        "weight_decay": config.weight_decay,
        # One pass over memory per parameter; on a CPU four times as fast as the default.
        "fused": True,
    }
    if config.offload or config.moments != "float32":
        moments = {"bfloat16": torch.bfloat16, "8bit": torch.uint8}.get(config.moments, trained[0].dtype)
        return CompactAdamW(groups, moments=moments, offload=config.offload, **options)
    return torch.optim.AdamW(groups, **options)


def learning_rate(config: Optimizer, step: int, steps: int) -> float:
    """The rate of step `step` (from 1) of `steps`: a linear warm-up, then the schedule.

    The first step after the warm-up has the full rate; the rate would be 0 one step after the last, so that every step
    trains. With 2 warm-up steps of 6, `linear` gives the shares 1/2, 1, 1, 3/4, 2/4, 1/4.
    """
    if step <= config.warmup_steps:
        return config.rate * step / config.warmup_steps
    done = min(1.0, (step - 1 - config.warmup_steps) / max(1, steps - config.warmup_steps))
    match config.schedule:
        case "constant":
            share = 1.0
        case "linear":
            share = 1.0 - done
        case "cosine":
            share = (1.0 + math.cos(math.pi * done)) / 2
        case _:
            assert_never(config.schedule)
    return config.rate * share


class CompactAdamW(torch.optim.AdamW):
    """AdamW that stores its moments elsewhere between steps; a step brings those of one parameter at a time back.

    Args: moments: the type that stores them; uint8 for codes with scales, which `<moment>_scales` of the state holds;
        offload: in host memory
    """

    def __init__(self, groups: list[dict[str, Any]], *, moments: torch.dtype, offload: bool, **options: Any) -> None:
        super().__init__(groups, **options)
        self._moments, self._offload = moments, offload

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient. closure: not supported."""
        groups = self.param_groups
        try:
            for group in groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self.param_groups = [{**group, "params": [parameter]}]
                        self.state[parameter] = self._load(parameter)
                        super().step()
                        for name, value in list(self.state[parameter].items()):
                            self.store(parameter, name, value)
        finally:
            self.param_groups = groups

    def store(self, parameter: Tensor, name: str, value: Tensor) -> None:
        """Stores a moment, or the number of steps, as it lies between steps."""
        device, state = torch.device("cpu") if self._offload else parameter.device, self.state[parameter]
        if name == "step":
            state[name] = value.to(device)
        elif self._moments != torch.uint8:
            state[name] = value.to(device, self._moments)
        elif uses_codes(parameter):
            codes, scales = quantize_shards(value, signed=name in SIGNED)
            state[name], state[name + SCALES] = codes.to(device), scales.to(device)
        else:
            state[name] = value.to(device, parameter.dtype)

    def _load(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter as AdamW wants it."""
        found, state = {}, self.state[parameter]
        for name, stored in state.items():
            if not name.endswith(SCALES):
                scales = state.get(name + SCALES)
                value = stored if scales is None else load_moment(name, stored, scales, parameter)
                found[name] = value.to(parameter.device, value.dtype if name == "step" else parameter.dtype)
        return found


def uses_codes(parameter: Tensor) -> bool:
    """Whether 8 bits a value save memory: small parameters are few, and short rows have many scales."""
    size = parameter.numel()
    return parameter.dim() > 1 and size >= LEAST_VALUES and size // parameter.shape[0] >= LEAST_ROW


def restore_moment(
    optimizer: torch.optim.Optimizer, parameter: Tensor, name: str, saved: Tensor, scales: Tensor | None = None
) -> None:
    """Gives an optimiser a tensor of a checkpoint: a moment, sharded as the parameter is, or the number of steps.

    Args: scales: of a moment that was saved as codes
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    if scales is not None:
        saved = load_moment(name, saved, scales, parameter)
    if isinstance(inner, CompactAdamW):
        inner.store(parameter, name, saved)
    else:
        inner.state[parameter][name] = saved if name == "step" else saved.to(parameter.dtype)


def load_moment(name: str, codes: Tensor, scales: Tensor, parameter: Tensor) -> Tensor:
    """A moment from its codes, on the parameter's device and in its type."""
    device = parameter.device
    return dequantize_shards(codes.to(device), scales.to(device), parameter.dtype, signed=name in SIGNED)
