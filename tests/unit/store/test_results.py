"""Means and intervals by hand."""

from __future__ import annotations

import pytest

from leyden.libs.store.results import statistic, wilson


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (1, 1, 0.2065, 1.0)],
)
def test_wilson_intervals_are_within_zero_and_one(successes: int, count: int, low: float, high: float) -> None:
    assert wilson(successes, count) == pytest.approx((low, high), abs=5e-5)


def test_numbers_get_a_normal_interval_of_the_unbiased_variance() -> None:
    # 1, 2, 3: mean 2, variance 1, half width 1.96 / sqrt(3).
    found = statistic(3, 6.0, 14.0, binary=False)
    assert (found.mean, found.high - found.mean) == pytest.approx((2.0, 1.1316), abs=1e-4)
    alone = statistic(1, 5.0, 25.0, binary=False)
    assert (alone.low, alone.high) == (5.0, 5.0)
