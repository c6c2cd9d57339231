import numpy as np
import pytest
import torch

from leyden.services.trainer.model.attention import TreeLayout
from leyden.services.trainer.model.cpu.attention import blocks_of
from leyden.services.trainer.rows import tree
from leyden.services.trainer.rows.tree import Pack, plan_forest

CPU = torch.device("cpu")


def packs(seed: int) -> list[Pack]:
    random = np.random.default_rng(seed)
    rows = [random.integers(0, 2, random.integers(1, 12)).astype(np.int32) for _ in range(random.integers(1, 9))]
    forest = plan_forest(rows, 9)
    return forest.prefixes + forest.packs


@pytest.mark.parametrize("seed", range(30))
def test_blocks_hold_exactly_the_pairs_that_the_mask_allows_and_each_once(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(tree, "LEAST_PREFIX", 1)
    for pack in packs(seed):
        layout = TreeLayout(pack, torch.float32, CPU)
        seen = np.zeros((len(pack), pack.prefix_tokens + len(pack)), dtype=int)
        for block in blocks_of(pack.ends_M, pack.prefix_tokens):
            size = (block.queries.stop - block.queries.start, block.keys.stop - block.keys.start)
            seen[block.queries, block.keys] += np.tri(*size, dtype=int) if block.causal else 1
        assert seen.tolist() == (layout.mask[0, 0] == 0).int().tolist()


def test_causal_blocks_precede_others_and_cover_every_query_once() -> None:
    for pack in packs(3):
        blocks = blocks_of(pack.ends_M, pack.prefix_tokens)
        assert [block.causal for block in blocks] == sorted((block.causal for block in blocks), reverse=True)
        own = [block.queries for block in blocks if block.causal]
        assert [place for queries in own for place in range(queries.start, queries.stop)] == list(range(len(pack)))
