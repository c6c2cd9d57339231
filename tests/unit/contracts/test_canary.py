"""The comparison of an engine's answer to a canary with the trainer's, by numbers worked out by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

import pytest

from leyden.libs.contracts.canary import Canary
from leyden.libs.contracts.canary.comparison import compare

Row = Sequence[float]


def canary(*logprobs: Row, dtype: Literal["float32", "bfloat16"] = "float32", first: int = 1) -> Canary:
    ids = tuple(tuple(range(first, first + len(row) + 1)) for row in logprobs)
    return Canary(token_ids=ids, logprobs=tuple(map(tuple, logprobs)), dtype=dtype, max_gap=0.1)


def test_the_gap_is_the_mean_over_all_tokens() -> None:
    found = compare(canary([-1.0, -2.0], [-3.0]), [[-1.003, -2.0], [-3.006]], in_float32=True)
    assert (found.tokens, found.gap, found.largest) == (3, pytest.approx(0.003), pytest.approx(0.006))
    assert (found.limit, found.moved, found.problem) == (pytest.approx(0.01), None, None)


@pytest.mark.parametrize(
    ("dtype", "in_float32", "limit"), [("float32", True, 0.01), ("float32", False, 0.1), ("bfloat16", True, 0.1)]
)
def test_the_limit_is_narrow_where_both_compute_in_float32(
    dtype: Literal["float32", "bfloat16"], in_float32: bool, limit: float
) -> None:
    for gap, passes in ((0.9 * limit, True), (1.1 * limit, False)):
        found = compare(canary([-1.0, -2.0], dtype=dtype), [[-1.0 - gap, -2.0 + gap]], in_float32=in_float32)
        assert (found.problem is None, found.limit) == (passes, pytest.approx(limit))


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_an_answer_that_is_no_number_is_another_version(value: float) -> None:
    found = compare(canary([-1.0, -2.0]), [[value, -2.0]])
    assert (found.gap, found.largest) == (None, None)
    assert found.problem is not None and found.problem.startswith(
        "1 of its log-probabilities of 2 fixed tokens are null"
    )


def test_an_engine_that_answers_as_the_version_before_has_older_weights_however_small_the_update() -> None:
    before, new = canary([-1.0, -2.0, -3.0]), canary([-1.0001, -2.0002, -2.9999])
    found = compare(new, [[-1.0, -2.0, -3.0]], before=before)
    assert found.gap is not None and found.gap < found.limit
    assert found.moved == pytest.approx(0)
    assert "older weights" in (found.problem or "")
    same = compare(new, new.logprobs, before=before)
    assert (same.moved, same.problem) == (pytest.approx(1), None)


def test_canaries_of_other_tokens_show_no_change() -> None:
    found = compare(canary([-1.0, -2.0]), [[-1.0, -2.0]], before=canary([-1.5, -2.0], first=7))
    assert (found.moved, found.problem) == (None, None)


@pytest.mark.parametrize(("change", "is_seen"), [(0.03, True), (0.003, False)])
def test_in_the_noise_of_bfloat16_a_small_update_shows_nothing(change: float, is_seen: bool) -> None:
    """Noise of 0.035 nats and 252 tokens: an engine with the new weights passes, whatever the update was."""
    random_ = random.Random(0)
    old = [random_.uniform(-8, -0.1) for _ in range(252)]
    new = [value + random_.choice([-change, change]) for value in old]
    noise = [random_.gauss(0, 0.035) for _ in old]
    before, after = canary(old, dtype="bfloat16"), canary(new, dtype="bfloat16")
    stale, fresh = ([a + b for a, b in zip(some, noise, strict=True)] for some in (old, new))
    assert compare(after, [fresh], before=before).problem is None
    assert (compare(after, [stale], before=before).problem is not None) == is_seen
