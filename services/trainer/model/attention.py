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
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
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


@cache
def _made_block_mask(device: str) -> Callable[..., BlockMask]:
    # Compiled, it never holds all pairs at once.
    return create_block_mask if device == "cpu" else torch.compile(create_block_mask, dynamic=True)


@cache
def _flex_attention(device: str) -> Any:
    # Without compilation it computes every pair, and a CPU has no backward pass for it.
    return flex_attention if device == "cpu" else torch.compile(flex_attention, dynamic=True)


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
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [1, H, M, D] queries, [1, G, P + M, D] keys and values, [1, M, H, D] out.

    Without `tree` it is plain causal attention, without a window.
    """
    if tree is not None:
        tree = tree.within(sliding_window)
    if tree is not None and tree.window is None and query.device.type == "cpu":
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return block_attention(query, key, value, tree.blocks, scale), None
    if tree is not None and query.device.type == "cuda" and tree.kernel == "flex":
        return block_sparse_attention(query, key, value, tree, scaling), None
    mask = attention_mask if tree is None else tree.mask
    out: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **others)
    return out


def block_sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, tree: TreeLayout, scaling: float | None
) -> Tensor:
    """FlexAttention over the visible pairs; shapes as `tree_attention` has them. A CPU has no backward pass for it."""
    # Under autocast rotated queries and keys are float32 beside values in bfloat16, which FlexAttention refuses.
    query, key = query.to(value.dtype), key.to(value.dtype)
    out: Tensor = _flex_attention(query.device.type)(
        query, key, value, block_mask=tree.block_mask, scale=scaling, enable_gqa=True, kernel_options=KERNEL_OPTIONS
    )
    return out.transpose(1, 2)


# Blocks and masks depend on the pack: within a compiled layer they would be compiled anew for each one.
AttentionInterface.register(NAME, torch.compiler.disable(tree_attention))  # type: ignore[no-untyped-call]
