"""Attention over token trees, registered as one of transformers' attention implementations.

Axes: H query heads, G key heads, P tokens of a pack's prefixes, M nodes of the pack, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from leyden.services.trainer.model.cpu.attention import Block, block_attention, blocks_of
from leyden.services.trainer.rows.tree import Pack, ancestor_mask

NAME = "leyden_tree"
Kernel = Literal["flex", "dense"]
KERNEL_OPTIONS: Any = {"BACKEND": "TRITON"}
"""By itself FlexAttention computes packs of fewer than 128 tokens with a kernel made for decoding, which does not
compile where tokens times query heads of a key head exceed 128: 33 tokens of a Qwen3-8B (torch 2.11, on an H200)."""


class TreeLayout:
    """The visible pairs of a pack behind its prefixes, in the form that each kernel wants.

    One layout serves all layers of a pass. (Not a dataclass: FSDP would rebuild it, and its mask, for every layer.)

    Args: kernel: that of CUDA devices; a CPU computes blocks, but windows and other devices take the dense mask;
        window: a token sees so many of its row, itself and the nearest before it; None for all
    """

    def __init__(
        self,
        pack: Pack,
        dtype: torch.dtype,
        device: torch.device,
        kernel: Kernel = "dense",
        window: int | None = None,
    ) -> None:
        self.pack, self.dtype, self.device, self.kernel, self.window = pack, dtype, device, kernel, window
        self._windowed: dict[int, TreeLayout] = {}

    def within(self, window: int | None) -> TreeLayout:
        """The layout of layers with a sliding window; this one where no row is longer than the window."""
        if window is None or int(self.pack.depths_M.max(initial=0)) < window:
            return self
        if window not in self._windowed:
            self._windowed[window] = TreeLayout(self.pack, self.dtype, self.device, self.kernel, window)
        return self._windowed[window]

    @cached_property
    def depths(self) -> Tensor:
        """[P + M]: the position of each key in its rows."""
        return torch.from_numpy(np.concatenate([np.arange(self.pack.prefix_tokens), self.pack.depths_M])).to(
            self.device
        )

    @cached_property
    def mask(self) -> Tensor:
        """[1, 1, M, P + M], additive: every node sees the prefixes, its ancestors and itself, within the window."""
        prefix, allowed = self.pack.prefix_tokens, torch.from_numpy(ancestor_mask(self.pack)).to(self.device)
        mask = torch.zeros(len(self.pack), prefix + len(self.pack), dtype=self.dtype, device=self.device)
        mask[:, prefix:].masked_fill_(~allowed, torch.finfo(self.dtype).min)
        if self.window is not None:
            distances = self.depths[prefix:, None] - self.depths
            mask.masked_fill_(distances >= self.window, torch.finfo(self.dtype).min)
        return mask[None, None]

    @cached_property
    def blocks(self) -> list[Block]:
        """The same pairs as contiguous blocks."""
        return blocks_of(self.pack.ends_M, self.pack.prefix_tokens)

    @cached_property
    def block_mask(self) -> BlockMask:
        """The same pairs for FlexAttention, which leaves out blocks of 128 x 128 without any."""
        prefix, nodes, window, depths = self.pack.prefix_tokens, len(self.pack), self.window, self.depths
        ends_M = torch.from_numpy(self.pack.ends_M).to(self.device)

        def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            node = key - prefix
            seen = (node < 0) | ((node <= query) & (query < ends_M[node.clamp(min=0)]))
            return seen if window is None else seen & (depths[prefix + query] - depths[key] < window)

        return _made_block_mask(self.device.type)(visible, None, None, nodes, prefix + nodes, device=str(self.device))


COMPILED: dict[str, Any] = {"dynamic": True, "recompile_limit": 64}
"""Gradients or none, a prefix or none, one node or more, few or many, a window or none: each has a code of its own.
Beyond torch's limit of 8 it would compute every pair."""


@cache
def _made_block_mask(device: str) -> Callable[..., BlockMask]:
    # Compiled, it never holds all pairs at once.
    if device == "cpu":
        return create_block_mask
    return torch.compile(create_block_mask, **COMPILED)


@cache
def _flex_attention(device: str) -> Any:
    # Without compilation it computes every pair, and a CPU has no backward pass for it.
    if device == "cpu":
        return flex_attention
    return torch.compile(flex_attention, **COMPILED)


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    tree: TreeLayout | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [1, H, M, D] queries, [1, G, P + M, D] keys and values, [1, M, H, D] out.

    Without `tree` it is plain causal attention, without a window.

    Args: s_aux: attention sinks, [H]: of each head, the logarithm of one more term in the softmax's sum, which has no
        value
    """
    if tree is not None:
        tree = tree.within(sliding_window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if tree is not None and tree.window is None and query.device.type == "cpu":
        return block_attention(query, key, value, tree.blocks, scale, s_aux), None
    if tree is not None and query.device.type == "cuda" and tree.kernel == "flex":
        return block_sparse_attention(query, key, value, tree, scaling, s_aux), None
    mask = attention_mask if tree is None else tree.mask
    if s_aux is not None:
        return sink_attention(query, key, value, mask, scale, s_aux), None
    out: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **others)
    return out


def block_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree: TreeLayout,
    scaling: float | None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """FlexAttention over the visible pairs; shapes as `tree_attention` has them. A CPU has no backward pass for it."""
    # Under autocast rotated queries and keys are float32 beside values in bfloat16, which FlexAttention refuses.
    query, key = query.to(value.dtype), key.to(value.dtype)
    given = {"block_mask": tree.block_mask, "scale": scaling, "enable_gqa": True, "kernel_options": KERNEL_OPTIONS}
    out: Tensor
    if sinks_H is None:
        out = _flex_attention(query.device.type)(query, key, value, **given)
    else:
        out, sums = _flex_attention(query.device.type)(query, key, value, return_aux=AuxRequest(lse=True), **given)
        # exp(sum) / (exp(sum) + exp(sink)): the part of the softmax's sum that is not the sink's.
        out = out * (sums.lse - sinks_H[:, None]).sigmoid()[..., None].to(out.dtype)
    return out.transpose(1, 2)


def sink_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, sinks_H: Tensor
) -> Tensor:
    """Attention under a dense mask with sinks; shapes as `tree_attention` has them, without a mask it is causal.

    A sink becomes the last key, which every query sees: it has its sink on one more axis of the head, and queries have
    1 there.
    """
    (heads, nodes, size), keys = query.shape[1:], key.shape[2]
    if mask is None:
        mask = torch.ones(nodes, keys, dtype=torch.bool, device=query.device).tril()
    # Fused kernels want heads in multiples of 8.
    more = (0, 8 - size % 8)
    sinks = pad((sinks_H / scale)[None, :, None, None], (size, more[1] - 1)).to(key.dtype)
    query = torch.cat([query, pad(query.new_ones(1, heads, nodes, 1), (0, more[1] - 1))], dim=-1)
    key, value = (states.repeat_interleave(heads // key.shape[1], dim=1) for states in (key, value))
    out = nn.functional.scaled_dot_product_attention(
        query,
        torch.cat([pad(key, more), sinks], dim=2),
        pad(value, (*more, 0, 1)),
        attn_mask=pad(mask, (0, 1), value=mask.dtype == torch.bool),
        scale=scale,
    )
    return out[..., :size].transpose(1, 2)


# Blocks and masks depend on the pack: within a compiled layer they would be compiled anew for each one.
AttentionInterface.register(NAME, torch.compiler.disable(tree_attention))  # type: ignore[no-untyped-call]
