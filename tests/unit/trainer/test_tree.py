import numpy as np
import pytest

from services.trainer.tree import Forest, ancestor_mask, plan_forest


def rows(*lists: list[int]) -> list[np.ndarray]:
    return [np.array(ids, dtype=np.int32) for ids in lists]


def random_rows(seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 2, random.integers(2, 9)).astype(np.int32) for _ in range(random.integers(1, 9))]


def test_two_rows_share_their_beginning_by_hand() -> None:
    forest = plan_forest(rows([1, 2, 3], [1, 2, 4, 5]), [2, 2], 100)
    (pack,) = forest.packs
    assert forest.prefix_P.tolist() == [1]
    assert pack.token_ids_M.tolist() == [2, 3, 4, 5]
    assert pack.depths_M.tolist() == [1, 2, 2, 3]
    assert pack.ends_M.tolist() == [4, 2, 4, 4]
    assert [nodes.tolist() for nodes in pack.nodes] == [[0, 1], [0, 2, 3]]
    assert ancestor_mask(pack).astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]


def test_the_prefix_ends_before_the_parent_of_the_first_trained_token() -> None:
    forest = plan_forest(rows([1, 2, 3, 4], [1, 2, 3, 5]), [3, 2], 100)
    assert forest.prefix_P.tolist() == [1]


def test_a_batch_without_rows_has_no_packs() -> None:
    assert plan_forest([], [], 100).packs == []


def test_a_single_row_is_one_pack_behind_its_own_prompt() -> None:
    forest = plan_forest(rows([1, 2, 3, 4]), [3], 100)
    assert forest.prefix_P.tolist() == [1, 2]
    assert forest.packs[0].token_ids_M.tolist() == [3, 4]


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("limit", [1, 6, 1000])
def test_every_row_is_found_along_its_nodes_and_no_node_is_doubled(seed: int, limit: int) -> None:
    token_ids = random_rows(seed)
    forest = plan_forest(token_ids, [1] * len(token_ids), limit)
    assert sorted(row for pack in forest.packs for row in pack.rows) == list(range(len(token_ids)))
    for pack in forest.packs:
        paths = set()
        mask = ancestor_mask(pack)
        for row, nodes in zip(pack.rows, pack.nodes, strict=True):
            whole = np.concatenate([forest.prefix_P, pack.token_ids_M[nodes]])
            assert whole.tolist() == token_ids[row].tolist()
            assert pack.depths_M[nodes].tolist() == list(range(len(forest.prefix_P), len(whole)))
            for i, node in enumerate(nodes):
                assert np.flatnonzero(mask[node]).tolist() == nodes[: i + 1].tolist()
                paths.add(tuple(whole[: len(forest.prefix_P) + i + 1]))
        assert len(paths) == len(pack)
        assert len(pack) <= limit or len(pack.rows) == 1


def test_packing_never_changes_what_is_common() -> None:
    token_ids = rows([1, 2, 3], [1, 2, 4], [1, 9, 9])
    small: Forest = plan_forest(token_ids, [2, 2, 2], 2)
    assert small.prefix_P.tolist() == [1]
    assert [len(pack) for pack in small.packs] == [2, 2, 2]
    assert small.computed_tokens == 7
