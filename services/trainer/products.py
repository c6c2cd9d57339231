"""Matrix products of linear layers on a CPU, through oneDNN forward and backward.

torch sends float32 products on a CPU to MKL, which is 2.2 times slower than oneDNN on AMD (115 against 255 GFLOP/s on
one core of an EPYC with AVX-512, 1024 rows of SmolLM2-135M's layers). Precision is float32 either way.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_AVAILABLE = hasattr(torch.ops.mkldnn, "_linear_pointwise")


def use_fast_products(model: nn.Module) -> None:
    """Sends the float32 products of every linear layer of a CPU model through oneDNN; others stay as they are.

    Parameters keep their names; only the way a layer multiplies changes.
    """
    if not _AVAILABLE:
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = partial(_linear, module)  # type: ignore[method-assign]  # parameters and names stay


def _linear(module: nn.Linear, inputs: Tensor) -> Tensor:
    weight, bias = module.weight, module.bias
    plain = weight.device.type != "cpu" or weight.dtype != torch.float32 or torch.is_autocast_enabled("cpu")
    if plain:
        return nn.functional.linear(inputs, weight, bias)
    product: Tensor = _Linear.apply(inputs, weight)  # type: ignore[no-untyped-call]
    return product if bias is None else product + bias


class _Linear(torch.autograd.Function):
    """y = x Wᵀ for x [..., in] and W [out, in]."""

    @staticmethod
    def forward(context: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        context.save_for_backward(inputs, weight)
        return _product(inputs, weight)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        inputs, weight = context.saved_tensors
        wants_inputs, wants_weight = context.needs_input_grad
        to_inputs = _product(gradient, weight.t()) if wants_inputs else None
        to_weight = None
        if wants_weight:
            to_weight = _product(gradient.flatten(0, -2).t(), inputs.flatten(0, -2).t())
        return to_inputs, to_weight


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left · rightᵀ over the last axis of both."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(left.contiguous(), right.contiguous(), None, "none", [], "")
    return product
