"""A long run through the whole stack: memory flat, latency at the end as at the start, and nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.growth import grow

# This many show a leak of kilobytes a rollout, and whatever slows down with their number.
ROLLOUTS = 20_000


@pytest.mark.timeout(3600)
def test_a_long_run_leaves_every_service_as_it_was_and_is_pruned_in_one_statement(tmp_path: Path) -> None:
    assert grow(tmp_path, ROLLOUTS).troubles(ROLLOUTS) == []
