from __future__ import annotations

import numpy as np
import torch

from leyden.services.engine.cache import PrefixCache
from leyden.services.engine.config import ModelConfig, Rope


def small_cache(capacity: int = 64) -> PrefixCache:
    config = ModelConfig("llama", (), 10, 4, 8, 1, 1, 1, 2, 1e-5, Rope(1e4, "default", {}), True, 64, frozenset())
    return PrefixCache(config, capacity)


def store(cache: PrefixCache, ids: list[int], namespace: str = "n") -> int:
    """Stores a sequence whose keys and values are its token ids; how many tokens were new."""
    cached, slots = cache.claim(namespace, np.array(ids, np.int32))
    values = torch.tensor(ids[cached : cached + len(slots)], dtype=torch.float32).view(-1, 1, 1, 1, 1)
    cache.write(slots, values.expand(-1, 1, 2, 1, 2))
    return len(slots)


def found(cache: PrefixCache, ids: list[int], namespace: str = "n") -> list[int]:
    """The token ids under which the longest stored prefix was written."""
    return cache.read(cache.find(namespace, np.array(ids, np.int32)))[:, 0, 0, 0, 0].int().tolist()


def test_the_longest_prefix_is_found_and_stored_once() -> None:
    cache = small_cache()
    assert store(cache, [1, 2, 3, 4]) == 4
    assert store(cache, [1, 2, 5, 6]) == 2
    assert store(cache, [1, 2, 3, 4]) == 0
    assert found(cache, [1, 2, 5, 7]) == [1, 2, 5]
    assert found(cache, [1, 2, 3, 4, 9]) == [1, 2, 3, 4]
    assert found(cache, [9]) == []
    assert cache.used_tokens == 6


def test_namespaces_share_nothing() -> None:
    cache = small_cache()
    store(cache, [1, 2, 3], "a")
    assert found(cache, [1, 2, 3], "b") == []


def test_the_least_recently_used_leaf_is_evicted_first() -> None:
    cache = small_cache(capacity=8)
    store(cache, [1, 2, 3, 4])
    store(cache, [5, 6, 7, 8])
    found(cache, [1, 2, 3, 4])
    store(cache, [9, 10])
    assert found(cache, [5, 6, 7, 8]) == []
    assert found(cache, [1, 2, 3, 4]) == [1, 2, 3, 4]
    assert found(cache, [9, 10]) == [9, 10]


def test_a_sequence_never_evicts_its_own_prefix() -> None:
    cache = small_cache(capacity=8)
    store(cache, [1, 2, 3, 4, 5, 6])
    assert store(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]) == 2
    assert found(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_random_sequences_read_back_what_was_written() -> None:
    cache, rng = small_cache(capacity=200), np.random.default_rng(0)
    for _ in range(300):
        ids = rng.integers(0, 3, rng.integers(1, 40)).tolist()
        store(cache, ids)
        assert found(cache, ids) == ids
        assert cache.used_tokens <= 200


def test_flush_forgets_everything() -> None:
    cache = small_cache(capacity=4)
    store(cache, [1, 2, 3, 4])
    cache.flush()
    assert (found(cache, [1, 2]), cache.used_tokens) == ([], 0)
    assert store(cache, [5, 6, 7, 8]) == 4
