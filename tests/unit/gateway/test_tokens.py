"""Tokens that grow: what was taken of them never changes, as numbers and as JSON, whoever goes on from it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import orjson
from hypothesis import given
from hypothesis import strategies as st

from leyden.services.gateway.tokens import TokenIds, Tokens

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=8)


def array(ids: list[int]) -> TokenIds:
    return np.asarray(ids, dtype=np.int32)


def seen(tokens: Tokens) -> tuple[list[int], list[int]]:
    return tokens.ids.tolist(), orjson.loads(b"[%b]" % tokens.json)


GROWN: dict[str, Callable[[Tokens, list[int], list[int]], Tokens]] = {
    "followed": lambda tokens, first, second: tokens.followed_by(array(first), array(second)),
    "ended": lambda tokens, first, second: tokens.ended_by(array(first), array(second)),
    "ended twice": lambda tokens, first, second: tokens.ended_by(array(first)).ended_by(array(second)),
    "followed after an end": lambda tokens, first, second: tokens.ended_by(array(first)).followed_by(array(second)),
    "apart": lambda tokens, first, second: tokens.apart().followed_by(array(first), array(second)).apart(),
    "read back": lambda tokens, first, second: tokens.or_longer(array([*tokens.ids.tolist(), *first, *second])),
}


@given(st.lists(st.tuples(st.integers(0, 50), st.sampled_from(sorted(GROWN)), IDS, IDS), max_size=30))
def test_tokens_stay_what_they_were_whatever_follows_them(steps):
    known = [(Tokens.of(array([])), list[int]())]
    for origin, way, first, second in steps:
        tokens, ids = known[origin % len(known)]
        known.append((GROWN[way](tokens, first, second), [*ids, *first, *second]))
        assert known[-1][0].length == len(known[-1][1])
        assert [seen(one) for one, _ in known] == [(expected, expected) for _, expected in known]
        assert [(one.least, one.greatest) for one, _ in known] == [(0, max(ids, default=0)) for _, ids in known]


def test_tokens_that_continue_others_take_memory_for_what_is_new():
    first = Tokens.of(array([1, 2, 3]))
    second, third = first.followed_by(array([4]), array([5])), first.followed_by(array([6]))
    assert second.added_bytes * 3 == first.added_bytes * 2
    assert third.added_bytes * 3 == first.added_bytes * 4
    assert first.followed_by(array([])).added_bytes == 0
    # An end leaves the place after it to others.
    assert second.ended_by(array([7, 8])).added_bytes == second.followed_by(array([9, 9])).added_bytes
    assert second.followed_by(array([7])).added_bytes == third.added_bytes * 6 // 4


def test_an_id_that_is_none_shows_in_the_bounds_however_late_it_comes():
    tokens = Tokens.of(array([5, 2])).followed_by(array([3]), array([-1]))
    assert (tokens.least, tokens.greatest) == (-1, 5)
    assert (tokens.followed_by(array([9])).least, tokens.followed_by(array([9])).greatest) == (-1, 9)


@given(IDS, IDS, IDS)
def test_two_prompts_have_a_beginning_in_common(both, first, second):
    one, other = Tokens.of(array([*both, *first])), Tokens.of(array([*both, *second]))
    rest = next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    assert one.common(other) == other.common(one) == len(both) + rest
    assert one.common(one) == one.length
