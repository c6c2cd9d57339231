"""Mixtures of experts: each token's feed-forward layer is that of a few experts, which a router chooses.

Axes: M tokens, E experts, k experts of a token, S = M · k pairs of token and expert.

Every pass reads the weights of all experts, in one tensor of each kind, so that their gradients exist, be they 0, and
ranks add them up in the same order whatever each rank's tokens chose.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from leyden.services.trainer.model.tensors import product_dtype

NAME = "leyden_experts"
FILE_MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The matrices of one expert in a file, by the tensor of all experts in memory."""


def routed_experts(module: Any, hidden_M_H: Tensor, chosen_M_k: Tensor, shares_M_k: Tensor) -> Tensor:
    """transformers' experts interface: the sum of each token's experts, weighted by the router's shares; [M, H].

    Products have the type of the token's other products, whatever the type of the weights in memory. Tokens are sorted
    by expert, and each sum is of one token's own pairs in a fixed order: results do not depend on the pack.

    Args: module: its experts in tensors [E, …] with the names and flags of transformers
    """
    count, dtype = chosen_M_k.shape[1], product_dtype(hidden_M_H)
    order_S = chosen_M_k.flatten().argsort(stable=True)
    experts_S = chosen_M_k.flatten()[order_S]
    sizes_E = torch.bincount(experts_S, minlength=module.num_experts)
    rows = hidden_M_H[order_S // count].to(dtype)
    inner = module._apply_gate(_products(module, "gate_up_proj", rows, experts_S, sizes_E))
    outputs = _products(module, "down_proj", inner, experts_S, sizes_E)
    weighted = outputs * shares_M_k.flatten()[order_S, None].to(outputs.dtype)
    found = torch.empty_like(weighted).index_copy(0, order_S, weighted)
    return found.view(*chosen_M_k.shape, -1).sum(dim=1).to(hidden_M_H.dtype)


def _products(module: Any, name: str, rows: Tensor, experts_S: Tensor, sizes_E: Tensor) -> Tensor:
    """Each row times the matrix of its expert. Rows are sorted by expert."""
    weight: Tensor = getattr(module, name).to(rows.dtype)
    if not module.is_transposed:
        weight = weight.transpose(1, 2)
    if rows.device.type == "cuda" and rows.dtype == torch.bfloat16:
        found = nn.functional.grouped_mm(rows, weight, offs=sizes_E.cumsum(0, dtype=torch.int32))
    else:
        parts = zip(torch.split(rows, sizes_E.tolist()), weight.unbind(), strict=True)
        found = torch.cat([part @ matrix for part, matrix in parts])
    return found + getattr(module, f"{name}_bias").to(rows.dtype)[experts_S] if module.has_bias else found


def use_tree_experts(model: PreTrainedModel) -> None:
    """Makes a mixture of experts compute by `routed_experts`; another model stays as it is."""
    if any(True for _ in expert_modules(model)):
        model.set_experts_implementation(NAME)


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that hold a layer's experts."""
    return [module for module in model.modules() if hasattr(module, "gate_up_proj") and hasattr(module, "num_experts")]


def hold_experts(model: nn.Module) -> None:
    """Rounds the weights of frozen experts to bfloat16, in place, as `hold_frozen` does those of linear layers.

    Routers stay: they are small, and a rounded one chooses other experts.
    """
    for module in expert_modules(model):
        for parameter in module.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.bfloat16()


def router_names(model: nn.Module) -> list[str]:
    """Names of the routers' parameters."""
    routers = [f"{name}." for name, module in model.named_modules() if "Router" in type(module).__name__]
    return [name for name, _ in model.named_parameters() if name.startswith(tuple(routers))]


# The number of an expert's tokens would be a constant of compiled code.
ALL_EXPERTS_FUNCTIONS.register(NAME, torch.compiler.disable(routed_experts))  # type: ignore[no-untyped-call]
