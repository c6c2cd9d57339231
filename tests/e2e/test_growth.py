"""A run of many rollouts through the whole stack loses nothing and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaigns.growth import grow
from tests.support.long import long_only

ROLLOUTS = 400


@long_only
@pytest.mark.timeout(900)
def test_rollouts_are_trained_and_pruned_without_a_loss(tmp_path: Path) -> None:
    assert grow(tmp_path, ROLLOUTS).losses(ROLLOUTS) == []
