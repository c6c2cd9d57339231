"""Attention over token trees, given to a Hugging Face model as one of its attention implementations.

Axes: H query heads, G key heads, R query heads of a key head, P tokens of its trunks, M nodes of a pack, D head size.

On a CPU the tree is cut into blocks of contiguous queries and keys, each of them causal or without any mask: only what
is visible is computed, nothing is gathered, and what siblings share is one block for all of them. Elsewhere one masked
product over the whole pack is faster than many small ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from leyden.services.trainer.tree import Pack, ancestor_mask

NAME = "leyden_tree"


@dataclass(frozen=True)
class Block:
    """Queries that see every key of a range, or, where causal, as many of them as their own place in the range."""

    queries: slice
    keys: slice
    causal: bool = False


@dataclass
class TreeLayout:
    """Who sees whom in a pack behind the keys of its trunks, in the form that the device wants."""

    pack: Pack
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def mask(self) -> Tensor:
        """[1, 1, M, P + M], additive: every node sees the trunks, its ancestors and itself."""
        allowed = torch.from_numpy(ancestor_mask(self.pack)).to(self.device)
        mask = torch.zeros(len(self.pack), self.pack.prefix + len(self.pack), dtype=self.dtype, device=self.device)
        mask[:, self.pack.prefix :].masked_fill_(~allowed, torch.finfo(self.dtype).min)
        return mask[None, None]

    @cached_property
    def blocks(self) -> list[Block]:
        """Who sees whom as contiguous blocks: the causal ones first, which hold every query exactly once.

        A run is a stretch of nodes with one child each; in depth-first order all that comes after it in its subtree is
        contiguous, and sees the whole run.
        """
        ends_M, prefix = self.pack.ends_M, self.pack.prefix
        starts = np.flatnonzero(np.diff(ends_M, prepend=-1))
        own, seen = [], [Block(slice(0, len(ends_M)), slice(0, prefix))] if prefix else []
        for begin, end in zip(starts.tolist(), [*starts[1:].tolist(), len(ends_M)], strict=True):
            run = slice(prefix + begin, prefix + end)
            own.append(Block(slice(begin, end), run, causal=True))
            if ends_M[begin] > end:
                seen.append(Block(slice(end, int(ends_M[begin])), run))
        return own + seen


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    tree: TreeLayout | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [1, H, M, D] queries, [1, G, P + M, D] keys and values, [1, M, H, D] out.

    Without `tree` it is plain causal attention.
    """
    if tree is None or query.device.type != "cpu":
        mask = attention_mask if tree is None else tree.mask
        plain: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **others)
        return plain
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out: Tensor = _TreeAttention.apply(query, key, value, tree.blocks, scale)  # type: ignore[no-untyped-call]
    return out, None


class _TreeAttention(torch.autograd.Function):
    """Block by block through torch's own fused kernels; parts of a query's answer are joined by their normalisers.

    A normaliser is the logarithm of a query's sum of exponentials. The kernel's backward pass needs only the whole
    one, so that each block's gradients are exact and simply add up.
    """

    @staticmethod
    def forward(
        context: Any, query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Block], scale: float
    ) -> Tensor:
        _, heads, nodes, size = query.shape
        out = query.new_empty(1, nodes, heads, size)
        out_G_R, query_G_R = _by_key_head(out.transpose(1, 2), key), _by_key_head(query, key)
        normalisers = query.new_empty(query_G_R.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
        for block in blocks:
            part, normaliser = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query_G_R[:, :, block.queries], *_seen(block, key, value, query_G_R), 0.0, block.causal, scale=scale
            )
            if block.causal:
                out_G_R[:, :, block.queries] = part
                normalisers[:, :, block.queries] = normaliser
            else:
                _join(out_G_R[:, :, block.queries], normalisers[:, :, block.queries], part, normaliser)
        context.save_for_backward(query, key, value, out, normalisers)
        context.blocks, context.scale = blocks, scale
        return out

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, normalisers = context.saved_tensors
        to_query, to_key, to_value = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        gradient_G_R, out_G_R = (_by_key_head(states.transpose(1, 2), key) for states in (gradient, out))
        query_G_R, to_query_G_R = _by_key_head(query, key), _by_key_head(to_query, key)
        for block in context.blocks:
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient_G_R[:, :, block.queries],
                query_G_R[:, :, block.queries],
                *_seen(block, key, value, query_G_R),
                out_G_R[:, :, block.queries],
                normalisers[:, :, block.queries],
                0.0,
                block.causal,
                scale=context.scale,
            )
            to_query_G_R[:, :, block.queries] += parts[0]
            to_key[0, :, block.keys] += parts[1].sum(dim=1)
            to_value[0, :, block.keys] += parts[2].sum(dim=1)
        return to_query, to_key, to_value, None, None


def _by_key_head(states: Tensor, key: Tensor) -> Tensor:
    """[1, H, M, D] -> [G, R, M, D], a view: the kernel takes key heads for a batch."""
    return states[0].view(key.shape[1], -1, *states.shape[2:])


def _seen(block: Block, key: Tensor, value: Tensor, query_G_R: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of a block as [G, R, k, D], without a copy for each of the R query heads."""
    keys, values = (states[0, :, None, block.keys].expand(-1, query_G_R.shape[1], -1, -1) for states in (key, value))
    return keys, values


def _join(out: Tensor, normaliser: Tensor, part: Tensor, part_normaliser: Tensor) -> None:
    """Brings a further part of the same queries' attention into `out` and `normaliser`, in place."""
    whole = torch.logaddexp(normaliser, part_normaliser)
    out *= (normaliser - whole).exp_()[..., None].to(out.dtype)
    out += part.mul_((part_normaliser - whole).exp_()[..., None].to(out.dtype))
    normaliser.copy_(whole)


AttentionInterface.register(NAME, tree_attention)
