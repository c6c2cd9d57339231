"""One task travels to new weights through every hand-off."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from leyden.libs.cli.local.platform import Platform
from leyden.libs.cli.view.watch import watch_run
from leyden.libs.client import Client
from tests.campaigns.soak import QUICK, bandit_run
from tests.invariants import lost_calls, violations


@pytest.mark.timeout(900)
def test_a_two_armed_bandit_learns_the_better_arm(platform: Platform, client: Client, received: Path) -> None:
    evaluation = {"dataset": "bandit", "rollouts_per_task": 4}
    created = client.create_run(bandit_run(received, "bandit", 26, evaluation=evaluation, **QUICK))
    run = watch_run(client, created.id, Console(quiet=True))

    assert (run.phase, run.reason) == ("completed", None)
    before, after = (e.results.reward for e in sorted(client.evaluations(run.id), key=lambda e: e.number))
    assert before is not None
    assert after is not None
    assert 0.2 < before.mean < 0.8
    assert after.mean > 0.95
    assert [version.version for version in client.policies(run.id)] == list(range(27))
    assert violations(platform.facts.database_url, run.id) == {}
    assert lost_calls(platform.facts.database_url, run.id, received) == []
