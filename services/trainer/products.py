"""Matrix products of a model's layers on a CPU: float32 through oneDNN, or bfloat16, forward and backward.

torch sends float32 products on a CPU to MKL, which is 2.2 times slower than oneDNN on AMD (115 against 255 GFLOP/s on
one core of an EPYC with AVX-512, 1024 rows of SmolLM2-135M's layers). bfloat16 products, casts included, reach 470.
Inputs, outputs, weights and gradients are float32 either way; only what is multiplied is rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_ONEDNN = hasattr(torch.ops.mkldnn, "_linear_pointwise")


@dataclass(frozen=True)
class _Gated:
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear


def use_fast_products(model: nn.Module, *, head: nn.Module | None = None, bfloat16: bool = False) -> None:
    """Changes how the linear layers of a CPU model multiply; parameters keep their names and values.

    The head's products stay float32, as the CPU engine's do, so that log-probabilities keep their digits.
    """
    for module in model.modules():
        if type(module) is nn.Linear:
            narrow = bfloat16 and module is not head
            module.forward = partial(_linear, module, narrow)  # type: ignore[method-assign]  # names must stay
        elif parts := _gated_parts(module):
            module.forward = partial(_gated, parts, module.forward, bfloat16)


def _gated_parts(module: nn.Module) -> _Gated | None:
    """The parts of a module that computes down(silu(gate(x)) · up(x)): by their names, then by what it answers."""
    children = dict(module.named_children())
    if children.keys() != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return None
    gate, up, down = (children[name] for name in ("gate_proj", "up_proj", "down_proj"))
    if not (isinstance(gate, nn.Linear) and isinstance(up, nn.Linear) and isinstance(down, nn.Linear)):
        return None
    with torch.no_grad():
        some = torch.linspace(-1, 1, 2 * gate.in_features, dtype=gate.weight.dtype, device=gate.weight.device)
        some = some.view(2, -1)
        alike = torch.allclose(module(some), down(nn.functional.silu(gate(some)) * up(some)), atol=1e-5)
    return _Gated(gate, up, down) if alike else None


def _linear(module: nn.Linear, narrow: bool, inputs: Tensor) -> Tensor:
    weight, bias = module.weight, module.bias
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not (narrow or _ONEDNN):
        return nn.functional.linear(inputs, weight, bias)
    product: Tensor = _Linear.apply(inputs, weight, narrow)  # type: ignore[no-untyped-call]
    return product if bias is None else product + bias


def _gated(parts: _Gated, plain: Callable[[Tensor], Tensor], narrow: bool, inputs: Tensor) -> Tensor:
    weight, bias = parts.down.weight, parts.down.bias
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not (narrow or _ONEDNN):
        return plain(inputs)
    product: Tensor = _GatedLinear.apply(parts.gate(inputs), parts.up(inputs), weight, narrow)  # type: ignore[no-untyped-call]
    return product if bias is None else product + bias


class _GatedLinear(torch.autograd.Function):
    """y = (silu(gate) · up) Wᵀ. What is multiplied is made again for the backward pass instead of being kept.

    Of SmolLM2-135M's activations these are a quarter.
    """

    @staticmethod
    def forward(context: Any, gate: Tensor, up: Tensor, weight: Tensor, narrow: bool) -> Tensor:
        context.save_for_backward(gate, up, weight)
        context.narrow = narrow
        return _product(nn.functional.silu(gate).mul_(up), weight, narrow)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        gate, up, weight = context.saved_tensors
        narrow = context.narrow
        opened = nn.functional.silu(gate)
        to_product = _product(gradient, weight.t(), narrow)
        to_weight = None
        if context.needs_input_grad[2]:
            to_weight = _product(gradient.flatten(0, -2).t(), (opened * up).flatten(0, -2).t(), narrow)
        to_gate = torch.ops.aten.silu_backward(to_product * up, gate)
        return to_gate, to_product.mul_(opened), to_weight, None


class _Linear(torch.autograd.Function):
    """y = x Wᵀ for x [..., in] and W [out, in]."""

    @staticmethod
    def forward(context: Any, inputs: Tensor, weight: Tensor, narrow: bool) -> Tensor:
        inputs = inputs.bfloat16() if narrow else inputs
        context.save_for_backward(inputs, weight)
        return _product(inputs, weight, narrow)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        inputs, weight = context.saved_tensors
        wants_inputs, wants_weight, _ = context.needs_input_grad
        narrow = inputs.dtype == torch.bfloat16
        gradient = gradient.bfloat16() if narrow else gradient
        to_inputs = _product(gradient, weight.t(), narrow) if wants_inputs else None
        to_weight = None
        if wants_weight:
            to_weight = _product(gradient.flatten(0, -2).t(), inputs.flatten(0, -2).t(), narrow)
        return to_inputs, to_weight, None


def product(left: Tensor, right: Tensor) -> Tensor:
    """left · rightᵀ over the last axis of both, by the fastest library for where and what they are."""
    if left.device.type != "cpu" or left.dtype != torch.float32 or not _ONEDNN:
        return left @ right.t()
    found: Tensor = torch.ops.mkldnn._linear_pointwise(left.contiguous(), right.contiguous(), None, "none", [], "")
    return found


def _product(left: Tensor, right: Tensor, narrow: bool) -> Tensor:
    """left · rightᵀ in float32."""
    return (left.bfloat16() @ right.bfloat16().t()).float() if narrow else product(left, right)
