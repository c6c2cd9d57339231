"""FlexAttention against the dense mask. On a CPU it has a forward pass alone."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from leyden.services.trainer.model.attention import TreeLayout, block_sparse_attention
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
