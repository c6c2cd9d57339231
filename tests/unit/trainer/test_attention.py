"""FlexAttention against the dense mask. On a CPU it has a forward pass alone."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from leyden.services.trainer.model.attention import TreeLayout, block_sparse_attention, sink_attention
from leyden.services.trainer.model.cpu.attention import block_attention
from leyden.services.trainer.rows import tree
from leyden.services.trainer.rows.tree import plan_forest

HEADS, KEY_HEADS, SIZE = 4, 2, 16


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("seed", range(10))
def test_flex_attention_equals_the_dense_mask(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(tree, "LEAST_PREFIX", 1)
    random = np.random.default_rng(seed)
    rows = [random.integers(0, 2, random.integers(1, 200)).astype(np.int32) for _ in range(random.integers(2, 9))]
    forest = plan_forest(rows, 300)
    torch.manual_seed(seed)
    module: Any = torch.nn.Module()
    module.num_key_value_groups = HEADS // KEY_HEADS
    module.is_causal = False
    for pack in forest.prefixes + forest.packs:
        layout = TreeLayout(pack, torch.float32, torch.device("cpu")).within(50 if seed % 2 else None)
        query = torch.randn(1, HEADS, len(pack), SIZE)
        key, value = torch.randn(2, 1, KEY_HEADS, pack.prefix_tokens + len(pack), SIZE)
        flex = block_sparse_attention(query, key, value, layout, 0.3)
        dense, _ = sdpa_attention_forward(module, query, key, value, layout.mask, scaling=0.3)
        torch.testing.assert_close(flex, dense, rtol=1e-5, atol=1e-6)
        sinks = torch.randn(HEADS)
        with_sinks = sink_attention(query, key, value, layout.mask, 0.3, sinks)
        flex = block_sparse_attention(query, key, value, layout, 0.3, sinks)
        torch.testing.assert_close(flex, with_sinks, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [8, 10])
def test_sinks_are_terms_of_the_softmax_without_a_value(size: int) -> None:
    torch.manual_seed(size)
    pack = plan_forest([np.arange(9, dtype=np.int32), np.array([0, 1, 7, 8], np.int32)], 300).packs[0]
    layout = TreeLayout(pack, torch.float64, torch.device("cpu"))
    states = [torch.randn(1, heads, len(pack), size, dtype=torch.float64) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    leaves = [one.requires_grad_() for one in (*states, torch.randn(HEADS, dtype=torch.float64))]
    query, key, value, sinks = leaves
    keys, values = (one.repeat_interleave(HEADS // KEY_HEADS, dim=1) for one in (key, value))
    scores = query @ keys.transpose(2, 3) * 0.3 + layout.mask
    column = sinks[None, :, None, None].expand(1, HEADS, len(pack), 1)
    plain = (torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1] @ values).transpose(1, 2)
    to = torch.randn_like(plain)
    expected = torch.autograd.grad(plain, leaves, to)
    for found in (
        sink_attention(query, key, value, layout.mask, 0.3, sinks),
        block_attention(query, key, value, layout.blocks, 0.3, sinks),
    ):
        torch.testing.assert_close(found, plain)
        for one, other in zip(torch.autograd.grad(found, leaves, to), expected, strict=True):
            torch.testing.assert_close(one, other)
