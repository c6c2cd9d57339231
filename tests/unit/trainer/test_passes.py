"""One order of passes for ranks whose forests differ."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.services.trainer.rows import tree
from leyden.services.trainer.rows.passes import Node, Pass, Shape, merged, nodes_of, passes
from leyden.services.trainer.rows.tree import plan_forest
from tests.unit.trainer.cases import agent_samples

shapes = st.recursive(st.none(), lambda below: st.lists(below, min_size=1, max_size=3), max_leaves=8)


def numbered(shape: Shape | None, number: int = 0) -> Node:
    return Node(number, None if shape is None else [numbered(one, i) for i, one in enumerate(shape)])


def depths_of(found: Sequence[Pass], numbers: bool) -> list[int]:
    """Around each pack the prefixes that are open: all of them, or those with a number."""
    depths, opened = [], list[int | None]()
    for kind, number in found:
        if kind == "open":
            opened.append(number)
        elif kind == "close":
            assert opened.pop() == number
        elif number is not None or not numbers:
            depths.append(sum(one is not None for one in opened) if numbers else len(opened))
    assert opened == []
    return depths


@given(st.lists(st.lists(shapes, max_size=3), min_size=1, max_size=4))
def test_every_rank_makes_the_same_passes_and_each_of_its_own_once(ranks: list[Shape]) -> None:
    shape = merged(ranks)
    found = [list(passes([numbered(one, i) for i, one in enumerate(own)], shape)) for own in ranks]
    assert len({tuple(kind for kind, _ in of_rank) for of_rank in found}) == 1
    for own, of_rank in zip(ranks, found, strict=True):
        alone = list(passes([numbered(one, i) for i, one in enumerate(own)], own))
        assert [one for one in of_rank if one.number is not None] == alone
        assert depths_of(of_rank, numbers=True) == depths_of(alone, numbers=False)


def test_a_rank_without_rows_passes_tokens_that_count_nothing() -> None:
    assert list(passes([], merged([[], [[None]]]))) == [Pass("open", None), Pass("pack", None), Pass("close", None)]
    assert merged([[], []]) == []


def test_a_forest_has_each_pack_behind_its_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "LEAST_PREFIX", 1)
    forest = plan_forest([one.token_ids.astype(np.int32) for one in agent_samples(0, groups=4)], 20)
    opened: list[int] = []
    packs = []
    nodes = nodes_of(forest)
    for kind, number in passes(nodes, merged([[node.shape for node in nodes]])):
        assert number is not None
        if kind == "open":
            assert forest.prefixes[number].path == tuple(opened)
            opened.append(number)
        elif kind == "close":
            assert opened.pop() == number
        else:
            assert forest.packs[number].path == tuple(opened)
            packs.append(number)
    assert sorted(packs) == list(range(len(forest.packs)))
    assert len(forest.prefixes) > 2
