from __future__ import annotations

import numpy as np
import torch

from leyden.services.engine.prefixes import choose_lengths, longest_match
from leyden.services.engine.rows import SharedPrefix, TokenIds
from leyden.services.engine.sequence import Namespace


def ids(*parts: tuple[int, int]) -> TokenIds:
    """Runs of (token, how many)."""
    return np.concatenate([np.full(count, token, np.int32) for token, count in parts])


def test_newcomers_share_what_is_common_and_cached() -> None:
    newcomers = [(ids((1, 100), (2, 10)), 110), (ids((1, 100), (3, 10)), 90), (ids((4, 100)), 100)]
    assert choose_lengths(newcomers, []) == [90, 90, 0]


def test_one_newcomer_shares_with_those_that_run() -> None:
    assert choose_lengths([(ids((1, 100)), 80)], [ids((1, 70), (2, 10))]) == [70]
    assert choose_lengths([(ids((1, 100)), 80)], [ids((1, 60), (2, 10))]) == [0]


def test_some_rows_share_a_much_longer_prefix_instead() -> None:
    long = [(ids((1, 100), (2, 300), (token, 5)), 404) for token in (7, 8)]
    short = [(ids((1, 100), (3, 20), (token, 5)), 124) for token in (7, 8)]
    assert choose_lengths([*long, *short], []) == [400, 400, 100, 100]


def test_the_longest_prefix_of_the_same_namespace_matches() -> None:
    here, there = Namespace(0, ""), Namespace(1, "")
    empty = torch.empty(0)
    prefixes = [SharedPrefix(here, ids((1, size)), empty, empty) for size in (64, 80)]
    assert longest_match(prefixes, here, ids((1, 90))) is prefixes[1]
    assert longest_match(prefixes, here, ids((1, 70), (2, 20))) is prefixes[0]
    assert longest_match(prefixes, there, ids((1, 90))) is None
