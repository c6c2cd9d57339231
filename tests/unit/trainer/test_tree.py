from collections.abc import Sequence

import numpy as np
import pytest

from leyden.services.trainer.rows import tree
from leyden.services.trainer.rows.tree import Forest, Pack, ancestor_mask, plan_forest


def rows(*lists: Sequence[int]) -> list[np.ndarray]:
    return [np.array(ids, dtype=np.int32) for ids in lists]


def random_rows(seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 2, random.integers(1, 9)).astype(np.int32) for _ in range(random.integers(1, 9))]


def before(forest: Forest, pack: Pack) -> list[int]:
    """The tokens of the prefixes that a pack grows on."""
    return [token for number in pack.path for token in forest.prefixes[number].token_ids_M.tolist()]


@pytest.fixture
def short_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "LEAST_PREFIX", 1)


def test_two_rows_share_their_beginning_by_hand() -> None:
    forest = plan_forest(rows([1, 2, 3], [1, 2, 4, 5]), 100)
    (pack,) = forest.packs
    assert forest.prefixes == []
    assert pack.token_ids_M.tolist() == [1, 2, 3, 4, 5]
    assert pack.depths_M.tolist() == [0, 1, 2, 2, 3]
    assert pack.ends_M.tolist() == [5, 5, 3, 5, 5]
    assert [nodes.tolist() for nodes in pack.nodes] == [[0, 1, 2], [0, 1, 3, 4]]
    assert ancestor_mask(pack)[2:].astype(int).tolist() == [[1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 1, 1]]


def test_a_batch_without_rows_has_no_packs() -> None:
    assert plan_forest([], 100).packs == []


def test_a_row_longer_than_a_pack_is_one_by_itself() -> None:
    (pack,) = plan_forest(rows([1, 2, 3, 4]), 3).packs
    assert pack.token_ids_M.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("limit", [1, 6, 1000])
@pytest.mark.usefixtures("short_prefixes")
def test_every_row_is_found_along_its_nodes_and_no_node_is_doubled(seed: int, limit: int) -> None:
    token_ids = random_rows(seed)
    forest = plan_forest(token_ids, limit)
    assert sorted(row for pack in forest.packs for row in pack.rows) == list(range(len(token_ids)))
    for pack in forest.packs:
        paths = set()
        mask = ancestor_mask(pack)
        prefix = before(forest, pack)
        assert pack.prefix_tokens == len(prefix)
        for row, nodes in zip(pack.rows, pack.nodes, strict=True):
            path = [*prefix, *pack.token_ids_M[nodes].tolist()]
            assert path == token_ids[row].tolist()
            assert pack.depths_M[nodes].tolist() == list(range(len(prefix), len(path)))
            for i, node in enumerate(nodes):
                assert np.flatnonzero(mask[node]).tolist() == nodes[: i + 1].tolist()
                paths.add(tuple(path[: len(prefix) + i + 1]))
        assert len(paths) == len(pack) > 0
        assert len(pack) <= limit or len(pack.rows) == 1


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.usefixtures("short_prefixes")
def test_prefixes_follow_their_parents_and_packs_are_depth_first(seed: int) -> None:
    forest = plan_forest(random_rows(seed), 4)
    for prefix in forest.prefixes:
        assert prefix.depths_M.tolist() == list(range(prefix.prefix_tokens, prefix.prefix_tokens + len(prefix)))
        assert len(before(forest, prefix)) == prefix.prefix_tokens
    for number in range(len(forest.prefixes)):
        grown = [place for place, pack in enumerate(forest.packs) if number in pack.path]
        assert grown == list(range(grown[0], grown[-1] + 1))


def test_groups_of_siblings_are_computed_once_however_small_the_packs() -> None:
    random = np.random.default_rng(0)
    system, questions = list(range(100)), [random.integers(100, 900, 200).tolist() for _ in range(3)]
    token_ids = rows(
        *([*system, *question, *random.integers(100, 900, 300).tolist()] for question in questions for _ in range(4))
    )
    distinct = 100 + 3 * 200 + 12 * 300
    for limit in (10_000, 1200, 700, 300):
        assert plan_forest(token_ids, limit).computed_tokens == distinct


def test_a_beginning_too_short_to_pay_is_computed_in_each_pack() -> None:
    token_ids = rows([1, 2, 3], [1, 2, 4], [1, 9, 9])
    forest = plan_forest(token_ids, 2)
    assert forest.prefixes == []
    assert [len(pack) for pack in forest.packs] == [3, 3, 3]
