"""Attention over token trees, given to a Hugging Face model as one of its attention implementations.

Axes: H query heads, G key heads, P prefix tokens, M nodes of a pack, D head size.

On a CPU every row's new nodes attend to exactly their path: time grows with what is visible, whatever the size of the
pack. Elsewhere one masked product over the whole pack is faster than many small ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from services.trainer.tree import Pack, ancestor_mask

NAME = "leyden_tree"


@dataclass(frozen=True)
class Segment:
    """The nodes begin:end that one row adds, the keys they may look at, and which of them each may: [1, 1, q, k]."""

    begin: int
    end: int
    keys: Tensor
    mask: Tensor


@dataclass
class TreeLayout:
    """Who sees whom in a pack behind `prefix` keys, in the form that the device wants."""

    pack: Pack
    prefix: int
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def mask(self) -> Tensor:
        """[1, 1, M, P + M], additive: every node sees the prefix, its ancestors and itself."""
        allowed = torch.from_numpy(ancestor_mask(self.pack)).to(self.device)
        mask = torch.zeros(len(self.pack), self.prefix + len(self.pack), dtype=self.dtype, device=self.device)
        mask[:, self.prefix :].masked_fill_(~allowed, torch.finfo(self.dtype).min)
        return mask[None, None]

    @cached_property
    def segments(self) -> list[Segment]:
        """The pack row by row: all nodes once, in order."""
        segments: list[Segment] = []
        begin = 0
        for nodes in self.pack.nodes:
            new = int((nodes >= begin).sum())
            if new:
                segments.append(self._segment(begin, new, torch.from_numpy(nodes)))
                begin += new
        return segments

    def _segment(self, begin: int, new: int, nodes: Tensor) -> Segment:
        keys = torch.cat([torch.arange(self.prefix), self.prefix + nodes])
        lowest = torch.finfo(self.dtype).min
        mask = torch.full((new, len(keys)), lowest, dtype=self.dtype).triu_(len(keys) - new + 1)
        return Segment(begin, begin + new, keys, mask[None, None])


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
    out: Tensor = _TreeAttention.apply(query, key, value, tree, scale)  # type: ignore[no-untyped-call]
    return out.transpose(1, 2).contiguous(), None


class _TreeAttention(torch.autograd.Function):
    """Segment by segment through torch's own fused kernels, whose gradients are added up in place."""

    @staticmethod
    def forward(context: Any, query: Tensor, key: Tensor, value: Tensor, tree: TreeLayout, scale: float) -> Tensor:
        out = torch.empty_like(query)
        normalisers = []
        for segment in tree.segments:
            inputs = _inputs(segment, query, key, value)
            part, normaliser = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *inputs, 0.0, False, attn_mask=segment.mask.to(query.dtype), scale=scale
            )
            out[:, :, segment.begin : segment.end] = part
            normalisers.append(normaliser)
        context.save_for_backward(query, key, value, out, *normalisers)
        context.tree, context.scale = tree, scale
        return out

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, *normalisers = context.saved_tensors
        to_query, to_key, to_value = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for segment, normaliser in zip(context.tree.segments, normalisers, strict=True):
            new = slice(segment.begin, segment.end)
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient[:, :, new],
                *_inputs(segment, query, key, value),
                out[:, :, new],
                normaliser,
                0.0,
                False,
                attn_mask=segment.mask.to(query.dtype),
                scale=context.scale,
            )
            to_query[:, :, new] = parts[0]
            for total, part in ((to_key, parts[1]), (to_value, parts[2])):
                total.index_add_(2, segment.keys, _sum_groups(part, key.shape[1]))
        return to_query, to_key, to_value, None, None


def _inputs(segment: Segment, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    repeats = query.shape[1] // key.shape[1]
    keys, values = (states.index_select(2, segment.keys).repeat_interleave(repeats, dim=1) for states in (key, value))
    return query[:, :, segment.begin : segment.end], keys, values


def _sum_groups(gradient: Tensor, key_heads: int) -> Tensor:
    """[1, H, k, D] -> [1, G, k, D]: query heads that share a key head add up."""
    grouped = gradient.view(1, key_heads, -1, *gradient.shape[2:])
    return grouped.sum(dim=2)


AttentionInterface.register(NAME, tree_attention)
