"""Mixtures of experts: each token's feed-forward layer is that of a few experts, which a router chooses.

Axes: M tokens, E experts, k experts of a token, S = M · k pairs of token and expert.

Every pass reads the weights of all experts, in one tensor of each kind, so that their gradients exist, be they 0, and
ranks add them up in the same order whatever each rank's tokens chose.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_layers import GradientCheckpointingLayer

from leyden.services.trainer.model.tensors import product_dtype

NAME = "leyden_experts"
ARGUMENT = "replayed_experts"
"""An argument of a model's pass: [M, L, k] of all L layers, -1 where the model chooses by itself."""
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


class RoutingReplay:
    """Lets recorded experts take the place of the routers' own choice; shares are those of the router's own scores.

    The scores of all experts, whatever was chosen, go through a softmax. The chosen ones are the shares, divided by
    their sum where the family does so; gradients reach the router through them. A softmax of the chosen scores alone,
    as in gpt-oss, is the same.

    A layer's attention gets the experts with the layer's other arguments and leaves them to the router behind it. It
    gets them once more where the layer is computed again in the backward pass.

    Source: R3 (arXiv 2510.11370), section 3

    Raises: ValueError: the model has no router
    """

    def __init__(self, model: PreTrainedModel) -> None:
        layers: list[Any] = [one for one in model.modules() if isinstance(one, GradientCheckpointingLayer)]
        first = next(iter(_routers(model)), None)
        if first is None:
            raise ValueError("training.routing_replay: the model has no router: leave the field out")
        self._layers, self._chosen, self._experts = len(layers), int(first.top_k), int(first.num_experts)
        for number, layer in enumerate(layers):
            routers = _routers(layer)
            layer.self_attn.register_forward_pre_hook(partial(_hand_over, routers, number), with_kwargs=True)
            for router in routers:
                router.register_forward_hook(_replay)

    def arguments(self, experts_M_S: NDArray[np.int32] | None, device: torch.device) -> dict[str, Tensor]:
        """The argument of the model's pass that replays these experts; none for None.

        Raises: ValueError: they are not this model's
        """
        if experts_M_S is None:
            return {}
        width, most = self._layers * self._chosen, int(experts_M_S.max(initial=-1))
        if experts_M_S.shape[1] != width or most >= self._experts:
            raise ValueError(
                f"recorded experts are not the model's: {experts_M_S.shape[1]} of a token and the number {most}, where"
                f" it has {self._layers} layers with {self._chosen} of {self._experts}: serve the run's own model"
            )
        return {ARGUMENT: torch.from_numpy(experts_M_S).to(device).view(-1, self._layers, self._chosen)}


def _routers(module: nn.Module) -> list[Any]:
    return [one for one in module.modules() if "Router" in type(one).__name__]


def _hand_over(
    routers: list[Any], number: int, _: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Takes the experts out of an attention's arguments, for the routers of its layer."""
    experts_M_L_k = kwargs.pop(ARGUMENT, None)
    for router in routers:
        router.replayed_M_k = None if experts_M_L_k is None else experts_M_L_k[:, number]
    return args, kwargs


def _replay(router: Any, _: Any, outputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    logits_M_E, shares_M_k, chosen_M_k = outputs
    if router.replayed_M_k is None:
        return outputs
    is_recorded_M = (router.replayed_M_k >= 0).all(dim=1, keepdim=True)
    chosen_M_k = torch.where(is_recorded_M, router.replayed_M_k.to(chosen_M_k.dtype), chosen_M_k)
    scores_M_E = logits_M_E.to(torch.promote_types(logits_M_E.dtype, torch.float32)).softmax(dim=-1)
    found_M_k = scores_M_E.gather(1, chosen_M_k)
    if getattr(router, "norm_topk_prob", True):
        found_M_k = found_M_k / found_M_k.sum(dim=-1, keepdim=True)
    return logits_M_E, found_M_k.to(shares_M_k.dtype), chosen_M_k


def router_names(model: nn.Module) -> list[str]:
    """Names of the routers' parameters."""
    routers = [f"{name}." for name, module in model.named_modules() if "Router" in type(module).__name__]
    return [name for name, _ in model.named_parameters() if name.startswith(tuple(routers))]


# The number of an expert's tokens would be a constant of compiled code.
ALL_EXPERTS_FUNCTIONS.register(NAME, torch.compiler.disable(routed_experts))  # type: ignore[no-untyped-call]
