"""Attention over token trees, registered as one of transformers' attention implementations.

Axes: H query heads, G key heads, P tokens of a pack's trunks, M nodes of the pack, D head size.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from leyden.services.trainer.cpu.attention import Block, block_attention, blocks_of
from leyden.services.trainer.tree import Pack, ancestor_mask

NAME = "leyden_tree"


class TreeLayout:
    """The visible pairs of a pack behind its trunks: as blocks for a CPU, as a mask for other devices.

    One layout serves all layers of a pass. (Not a dataclass: FSDP would rebuild it, and its mask, for every layer.)
    """

    def __init__(self, pack: Pack, dtype: torch.dtype, device: torch.device) -> None:
        self.pack, self.dtype, self.device = pack, dtype, device

    @cached_property
    def mask(self) -> Tensor:
        """[1, 1, M, P + M], additive: every node sees the trunks, its ancestors and itself."""
        allowed = torch.from_numpy(ancestor_mask(self.pack)).to(self.device)
        mask = torch.zeros(len(self.pack), self.pack.prefix + len(self.pack), dtype=self.dtype, device=self.device)
        mask[:, self.pack.prefix :].masked_fill_(~allowed, torch.finfo(self.dtype).min)
        return mask[None, None]

    @cached_property
    def blocks(self) -> list[Block]:
        """The same pairs as contiguous blocks."""
        return blocks_of(self.pack)


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
    if tree is not None and query.device.type == "cpu":
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return block_attention(query, key, value, tree.blocks, scale), None
    mask = attention_mask if tree is None else tree.mask
    out: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **others)
    return out


AttentionInterface.register(NAME, tree_attention)
