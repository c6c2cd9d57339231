"""The store's clock is known as exactly as its quickest reading, and a clock that was set is followed."""

from __future__ import annotations

import time

import pytest

from leyden.libs.queue.store_clock import StoreClock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StoreClock:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    return StoreClock()


def test_the_time_before_a_reading_is_zero(clock: StoreClock) -> None:
    assert clock.now() == 0.0


def test_the_quickest_reading_is_the_error_whatever_comes_after_it(clock: StoreClock) -> None:
    # The store is 1000 s ahead. A slow statement, a quick one, and two slow ones that read it early and late.
    for before, after, moment in [(1.0, 3.0, 1002.5), (4.0, 4.002, 1004.001), (5.0, 8.0, 1005.1), (9.0, 12.0, 1011.9)]:
        clock.add(moment, before, after)
    assert abs(clock.now() - 1100.0) <= 0.001


def test_a_clock_that_was_set_is_followed(clock: StoreClock) -> None:
    clock.add(1004.001, 4.0, 4.002)
    clock.add(505.001, 5.0, 5.002)
    assert abs(clock.now() - 600.0) <= 0.001
