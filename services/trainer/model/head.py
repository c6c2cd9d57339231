"""Log-probabilities of sampled tokens, and entropies, from last hidden states, without materialising all logits.

Axes: K sampled tokens, U distinct pairs of hidden state and temperature, H hidden size, V vocabulary, v a tile of it.

Logits exist one tile at a time, forward and backward: peak memory depends neither on how many tokens are read nor on
the vocabulary. The backward pass computes a tile's logits again, and only for rows that have a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from leyden.libs.contracts.config.computation import tile_logits
from leyden.services.trainer.model.cpu import products
from leyden.services.trainer.model.tensors import product_dtype

# More rows would make tiles too narrow for fast products.
TILE_ROWS = 2048


def sampled_outputs(
    head: nn.Linear,
    hidden_U_H: Tensor,
    temperatures_U: Tensor,
    rows_K: Tensor,
    token_ids_K: Tensor,
    *,
    entropies: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(head(hidden) / T) at (rows_K, token_ids_K), [K], and the entropy of each state, [U] in nats.

    Args:    rows_K: into U, so that tokens sampled from one state share its logits; token_ids_K: into V
    Returns: float32 at least; None unless `entropies`
    """
    weight_V_H: Tensor = head.weight
    # A temperature in bfloat16 is up to 0.4 % off, and log-probabilities would be those of another policy.
    wide = torch.promote_types(hidden_U_H.dtype, torch.float32)
    temperatures_U_1 = temperatures_U[:, None].to(wide)
    scaled_U_H = hidden_U_H / temperatures_U_1
    if head.bias is not None:
        weight_V_H = torch.cat([weight_V_H, head.bias[:, None]], dim=1)
        scaled_U_H = torch.cat([scaled_U_H, 1 / temperatures_U_1], dim=1)
    columns = scaled_U_H.to(product_dtype(hidden_U_H)), weight_V_H, rows_K, token_ids_K
    found: tuple[Tensor, Tensor | None] = _SampledOutputs.apply(*columns, entropies)  # type: ignore[no-untyped-call]
    return found


class _SampledOutputs(torch.autograd.Function):
    """log softmax(hidden · weightᵀ) at sampled tokens; products in the dtype of `hidden`, sums in float32 at least.

    The entropy of a state with logits z is log Σ exp z - Σ p z; its derivative by z is -p (log p + entropy).
    """

    @staticmethod
    def forward(
        context: Any, hidden_U_H: Tensor, weight_V_H: Tensor, rows_K: Tensor, token_ids_K: Tensor, entropies: bool
    ) -> tuple[Tensor, Tensor | None]:
        wide = torch.promote_types(hidden_U_H.dtype, torch.float32)
        normalisers_U = hidden_U_H.new_full((len(hidden_U_H),), -torch.inf, dtype=wide)
        sampled_K = hidden_U_H.new_zeros(len(rows_K), dtype=wide)
        means_U = torch.zeros_like(normalisers_U) if entropies else None
        for rows, tokens in _tiles(len(hidden_U_H), len(weight_V_H), hidden_U_H.device):
            logits_u_v = _product(hidden_U_H[rows], weight_V_H[tokens].to(hidden_U_H.dtype)).to(wide)
            top_u = logits_u_v.amax(dim=1)
            shares_u_v = (logits_u_v - top_u[:, None]).exp_()
            normalisers_u = torch.logaddexp(normalisers_U[rows], top_u + shares_u_v.sum(dim=1).log())
            if means_U is not None:
                # Σ p z of the tiles so far.
                means_U[rows] *= (normalisers_U[rows] - normalisers_u).exp()
                # Not `vecdot`, which autocast computes in bfloat16.
                means_U[rows] += shares_u_v.mul_(logits_u_v).sum(dim=1) * (top_u - normalisers_u).exp()
            normalisers_U[rows] = normalisers_u
            # From the tile that the normaliser saw: another product, rounded otherwise, can exceed it.
            row_K, token_K = rows_K - rows.start, token_ids_K - tokens.start
            here_k = ((row_K >= 0) & (rows_K < rows.stop) & (token_K >= 0) & (token_ids_K < tokens.stop)).nonzero()[
                :, 0
            ]
            sampled_K[here_k] = logits_u_v[row_K[here_k], token_K[here_k]]
        entropies_U = None if means_U is None else normalisers_U - means_U
        context.save_for_backward(hidden_U_H, weight_V_H, rows_K, token_ids_K, normalisers_U, entropies_U)
        # A loss without a bonus has no gradient of entropies, and pays for none.
        context.set_materialize_grads(False)
        return sampled_K - normalisers_U[rows_K], entropies_U

    @staticmethod
    def backward(
        context: Any, gradient_K: Tensor | None, to_entropies_U: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden_U_H, weight_V_H, rows_K, token_ids_K, normalisers_U, entropies_U = context.saved_tensors
        wide, (wants_hidden, wants_weight, *_) = normalisers_U.dtype, context.needs_input_grad
        if gradient_K is None:
            gradient_K = torch.zeros_like(rows_K, dtype=wide)
        to_hidden = torch.zeros_like(hidden_U_H, dtype=wide) if wants_hidden else None
        to_weight = torch.zeros_like(weight_V_H, dtype=wide) if wants_weight else None
        if to_hidden is not None:
            to_hidden.index_add_(0, rows_K, weight_V_H[token_ids_K].to(wide) * gradient_K[:, None])
        if to_weight is not None:
            to_weight.index_add_(0, token_ids_K, hidden_U_H[rows_K].to(wide) * gradient_K[:, None])

        gradient_U = torch.zeros_like(normalisers_U).index_add_(0, rows_K, gradient_K)
        columns_U = [normalisers_U, gradient_U]
        if entropies_U is not None and to_entropies_U is not None:
            columns_U += [entropies_U, to_entropies_U]
        live = torch.stack([gradient_U, *columns_U[3:]]).any(dim=0).nonzero()[:, 0]
        hidden_u_H, columns_u = hidden_U_H[live], [column_U[live][:, None] for column_U in columns_U]
        to_live = torch.zeros_like(hidden_u_H, dtype=wide)
        for rows, tokens in _tiles(len(live), len(weight_V_H), hidden_U_H.device):
            normalisers, gradients, *bonus = (column[rows] for column in columns_u)
            weight_v_H = weight_V_H[tokens].to(hidden_u_H.dtype)
            logprobs_u_v = _product(hidden_u_H[rows], weight_v_H).to(wide).sub_(normalisers)
            if bonus:
                gradients = gradients + bonus[1] * (logprobs_u_v + bonus[0])
            away_u_v = logprobs_u_v.exp_().mul_(gradients).to(hidden_u_H.dtype)
            if to_hidden is not None:
                to_live[rows] += _product(away_u_v, weight_v_H.t())
            if to_weight is not None:
                to_weight[tokens] -= _product(away_u_v.t(), hidden_u_H[rows].t())
        if to_hidden is not None:
            to_hidden.index_add_(0, live, to_live, alpha=-1)
        return (
            None if to_hidden is None else to_hidden.to(hidden_U_H.dtype),
            None if to_weight is None else to_weight.to(weight_V_H.dtype),
            None,
            None,
            None,
        )


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left · rightᵀ."""
    return products.product(left, right) if left.device.type == "cpu" else left @ right.t()


def _tiles(rows: int, tokens: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    height = max(1, min(rows, TILE_ROWS))
    width = max(1, tile_logits(device.type) // height)
    for top in range(0, rows, height):
        for left in range(0, tokens, width):
            yield slice(top, min(top + height, rows)), slice(left, min(left + width, tokens))
