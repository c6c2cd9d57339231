"""A long run through the whole stack: memory flat, latency at the end as at the start, and nothing left behind."""

from __future__ import annotations

from pathlib import Path

from tests.growth import grow

# `make growth` runs 20,000; this many show a leak of some kilobytes a rollout, and anything that slows down soon.
ROLLOUTS = 4000


def test_a_long_run_leaves_every_service_as_it_was_and_is_pruned_in_one_statement(tmp_path: Path) -> None:
    assert grow(tmp_path, ROLLOUTS).troubles(ROLLOUTS) == []
