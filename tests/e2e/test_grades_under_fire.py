"""Grader, credit and API are killed between grade and credit: no reward is lost, doubled, or trained as 0."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaigns.graded import VICTIMS, soak_grades
from tests.support.long import long_only

KILLS = 12


@long_only
@pytest.mark.timeout(900)
def test_kills_between_grade_and_credit_change_no_reward(tmp_path: Path) -> None:
    found, done = soak_grades(tmp_path, KILLS, seed=0, steps=4)
    assert found.words == []
    assert (found.runs_completed, found.rewards_lost, found.rewards_wrong) == (found.runs, 0, 0)
    assert found.ratings == found.rollouts > 0
    assert done["kills"] >= KILLS
    assert {victim.split(".")[0] for victim in done["kills_by_victim"]} <= set(VICTIMS)
