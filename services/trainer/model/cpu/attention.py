"""Attention over token trees on a CPU: a pack is cut into contiguous blocks, each of them causal or without a mask.

Axes: H query heads, G key heads, R query heads of a key head, P tokens of a pack's prefixes, M nodes of a pack, D head
size.

Why: one masked product over a pack took 19.2 s a step of the demo, and the blocks 18.9 with less memory. A kernel
computes only visible pairs, no key is gathered, and siblings share the block of their common beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """Every query sees every key of its block; in a causal block query i sees the keys 0 to i."""

    queries: slice
    keys: slice
    causal: bool = False


def blocks_of(ends_M: NDArray[np.int64], prefix: int) -> list[Block]:
    """The visible pairs of a pack, each in one block: first the causal blocks, which hold every query exactly once.

    A run is a stretch of nodes with one child each. In depth-first order the rest of its subtree follows it, and every
    node there sees the entire run.

    Args: ends_M: as `Pack` has them; prefix: its prefix tokens
    """
    starts = np.flatnonzero(np.diff(ends_M, prepend=-1))
    own, above = [], [Block(slice(0, len(ends_M)), slice(0, prefix))] if prefix else []
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(ends_M)], strict=True):
        run = slice(prefix + start, prefix + stop)
        own.append(Block(slice(start, stop), run, causal=True))
        if ends_M[start] > stop:
            above.append(Block(slice(stop, int(ends_M[start])), run))
    return own + above


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Block], scale: float, sinks_H: Tensor | None = None
) -> Tensor:
    """Softmax attention over the visible pairs.

    Args:    query: [1, H, M, D]; key, value: [1, G, P + M, D]; scale: factor of the products before the softmax;
        sinks_H: of each head, the logarithm of one more term in the softmax's sum, which has no value
    Returns: [1, M, H, D]
    """
    out: Tensor = _BlockAttention.apply(query, key, value, sinks_H, blocks, scale)  # type: ignore[no-untyped-call]
    return out


class _BlockAttention(torch.autograd.Function):
    """Runs torch's fused kernel on one block after another and joins the parts of each query's output.

    A normaliser is the logarithm of a query's sum of exponentials. The backward kernel needs only the normaliser over
    all blocks: each block's gradients are then exact, and the block gradients add up. A sink adds to a
    normaliser alone.
    """

    @staticmethod
    def forward(
        context: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks_H: Tensor | None,
        blocks: Sequence[Block],
        scale: float,
    ) -> Tensor:
        _, heads, nodes, size = query.shape
        out = query.new_empty(1, nodes, heads, size)
        out_G_R, query_G_R = _by_key_head(out.transpose(1, 2), key), _by_key_head(query, key)
        normalisers = query.new_empty(query_G_R.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
        for block in blocks:
            part, normaliser = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query_G_R[:, :, block.queries], *_visible(block, key, value, query_G_R), 0.0, block.causal, scale=scale
            )
            if block.causal:
                out_G_R[:, :, block.queries] = part
                normalisers[:, :, block.queries] = normaliser
            else:
                _join(out_G_R[:, :, block.queries], normalisers[:, :, block.queries], part, normaliser)
        if sinks_H is not None:
            total = torch.logaddexp(normalisers, _of_heads(sinks_H, normalisers))
            out_G_R *= (normalisers - total).exp_()[..., None].to(out.dtype)
            normalisers = total
        context.save_for_backward(query, key, value, sinks_H, out, normalisers)
        context.blocks, context.scale = blocks, scale
        return out

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None, None]:
        query, key, value, sinks_H, out, normalisers = context.saved_tensors
        to_query, to_key, to_value = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        gradient_G_R, out_G_R = (_by_key_head(states.transpose(1, 2), key) for states in (gradient, out))
        query_G_R, to_query_G_R = _by_key_head(query, key), _by_key_head(to_query, key)
        for block in context.blocks:
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient_G_R[:, :, block.queries],
                query_G_R[:, :, block.queries],
                *_visible(block, key, value, query_G_R),
                out_G_R[:, :, block.queries],
                normalisers[:, :, block.queries],
                0.0,
                block.causal,
                scale=context.scale,
            )
            to_query_G_R[:, :, block.queries] += parts[0]
            to_key[0, :, block.keys] += parts[1].sum(dim=1)
            to_value[0, :, block.keys] += parts[2].sum(dim=1)
        to_sinks = None
        if sinks_H is not None:
            # A weight of the softmax moves away from the output, and a sink's own part of the output is 0.
            weights = (_of_heads(sinks_H, normalisers) - normalisers).exp()
            to_sinks = -(weights * (gradient_G_R * out_G_R).sum(dim=-1)).sum(dim=-1).flatten().to(sinks_H.dtype)
        return to_query, to_key, to_value, to_sinks, None, None


def _by_key_head(states: Tensor, key: Tensor) -> Tensor:
    """[1, H, M, D] -> [G, R, M, D], a view: the kernel treats key heads as a batch."""
    return states[0].view(key.shape[1], -1, *states.shape[2:])


def _of_heads(values_H: Tensor, like_G_R_M: Tensor) -> Tensor:
    """[H] -> [G, R, 1], in the type of `like_G_R_M`."""
    return values_H.to(like_G_R_M.dtype).view(*like_G_R_M.shape[:2], 1)


def _visible(block: Block, key: Tensor, value: Tensor, query_G_R: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of a block as [G, R, k, D], without a copy for each of the R query heads."""
    keys, values = (states[0, :, None, block.keys].expand(-1, query_G_R.shape[1], -1, -1) for states in (key, value))
    return keys, values


def _join(out: Tensor, normaliser: Tensor, part: Tensor, part_normaliser: Tensor) -> None:
    """Adds another block's part of the same queries to `out` and `normaliser`, in place."""
    total = torch.logaddexp(normaliser, part_normaliser)
    out *= (normaliser - total).exp_()[..., None].to(out.dtype)
    out += part.mul_((part_normaliser - total).exp_()[..., None].to(out.dtype))
    normaliser.copy_(total)
