"""Matrix products on a CPU: float32 through oneDNN, or bfloat16, forward and backward.

Why: torch multiplies float32 matrices with MKL, which reaches 115 GFLOP/s on one core of an EPYC with AVX-512 (1024
rows of SmolLM2-135M's layers); oneDNN reaches 255 and bfloat16, casts included, 470 (bench row `trainer`). Inputs,
outputs, weights and gradients stay float32 either way: only the factors of a product are rounded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from leyden.services.trainer.model.held import HeldLinear

_ONEDNN = hasattr(torch.ops.mkldnn, "_linear_pointwise")


def use_fast_products(model: nn.Module, *, head: nn.Module | None = None, bfloat16: bool = False) -> None:
    """Replaces the class of linear layers in float32, or held; parameters retain their names and values.

    The head always multiplies in float32, as the CPU engine's does, so that log-probabilities lose no digits.
    """
    for module in model.modules():
        narrow = bfloat16 and module is not head
        wide = type(module) is nn.Linear and module.weight.dtype == torch.float32
        if (wide or type(module) is HeldLinear) and (narrow or _ONEDNN):
            module.__class__ = _NarrowLinear if narrow else _WideLinear


class _WideLinear(nn.Linear):
    """Multiplies in float32."""

    def forward(self, inputs: Tensor) -> Tensor:
        return _linear(self, narrow=False, inputs=inputs)


class _NarrowLinear(nn.Linear):
    """Multiplies in bfloat16."""

    def forward(self, inputs: Tensor) -> Tensor:
        return _linear(self, narrow=True, inputs=inputs)


def _linear(module: nn.Linear, *, narrow: bool, inputs: Tensor) -> Tensor:
    outputs: Tensor = _Linear.apply(inputs, module.weight, narrow)  # type: ignore[no-untyped-call]
    return outputs if module.bias is None else outputs + module.bias


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
    """left · rightᵀ over the last axis of both: oneDNN for float32, torch's own product for other types."""
    # torch.compile cannot lower the private operator.
    if left.dtype != torch.float32 or not _ONEDNN or torch.compiler.is_compiling():
        return left @ right.t()
    found: Tensor = torch.ops.mkldnn._linear_pointwise(left.contiguous(), right.contiguous(), None, "none", [], "")
    return found


def _product(left: Tensor, right: Tensor, narrow: bool) -> Tensor:
    """left · rightᵀ in float32."""
    return (left.bfloat16() @ right.bfloat16().t()).float() if narrow else product(left, right.to(left.dtype))
