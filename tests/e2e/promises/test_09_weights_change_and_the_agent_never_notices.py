"""Weights change and the agent never notices: requests are held, not refused, while engines swap."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psycopg
import pytest

from leyden.libs.cli.local.platform import Platform
from leyden.libs.client import Client
from tests.campaigns.soak import bandit_run
from tests.invariants import lost_calls, violations
from tests.support.chaos import RunWatch
from tests.support.long import long_only

PATIENT = Path(__file__).parents[2] / "agents" / "patient.py"
WAIT_SECONDS = 240.0
AGENTS = 8
LAG = 1


def patient_run(log: Path, steps: int, calls: int) -> dict[str, Any]:
    environment = {"PATIENT_LOG": str(log), "PATIENT_CALLS": str(calls)}
    agent = {"command": ["{python}", "-I", str(PATIENT)], "environment": environment}
    sampling = {"group_size": AGENTS // 2, "groups_per_step": 2, "max_policy_lag": LAG, "max_attempts": 3}
    return bandit_run(log, "patient", steps, agent=agent, sampling=sampling, runner={"timeout_seconds": 600})


def logged(log: Path, word: str) -> list[Any]:
    """Values that agents logged under a word, from complete lines only."""
    lines = log.read_text().rpartition("\n")[0].splitlines()
    return [line[word] for line in map(json.loads, lines) if word in line]


def nobody_noticed(platform: Platform, client: Client, run_id: str, log: Path) -> None:
    """The run completed, every agent got all its answers at its first attempt, and the store has all of them."""
    assert RunWatch(platform, run_id).wait_for_end(WAIT_SECONDS), client.run(run_id)
    ended = client.run(run_id)
    assert (ended.phase, ended.reason, logged(log, "error")) == ("completed", None, [])
    assert violations(platform.facts.database_url, run_id) == {}
    assert lost_calls(platform.facts.database_url, run_id, log) == []
    with psycopg.connect(platform.facts.database_url) as connection:
        kinds = "SELECT kind, count(*) FROM outcomes WHERE run_id = %s AND kind <> 'cancelled' GROUP BY kind"
        assert [kind for kind, _ in connection.execute(kinds, (run_id,)).fetchall()] == ["succeeded"]


@long_only
@pytest.mark.timeout(900)
def test_agents_get_answers_while_a_training_changes_their_weights(
    platform: Platform, client: Client, received: Path
) -> None:
    steps = 6
    run = client.create_run(patient_run(received, steps, calls=6))
    nobody_noticed(platform, client, run.id, received)
    named = {answer["system_fingerprint"] for answer in logged(received, "answer")}
    # A step takes nothing older than the lag, so no more than that many versions in a row were passed over.
    assert len(named) >= steps // (LAG + 1)
