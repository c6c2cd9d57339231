"""Weights change and the agent never notices: requests are held, not refused, while engines swap."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from leyden.libs.cli.platform import Platform
from leyden.libs.cli.services import SERVICES
from leyden.libs.client import Client
from tests.chaos import RunWatch
from tests.invariants import lost_calls, violations
from tests.soak import bandit_run

PATIENT = Path(__file__).parents[2] / "agents" / "patient.py"
WAIT_SECONDS = 240.0
AGENTS = 8
LAG = 1


def patient_run(log: Path, steps: int, calls: int, **environment: str) -> dict[str, Any]:
    agent = {
        "command": ["{python}", "-I", str(PATIENT)],
        "environment": {"PATIENT_LOG": str(log), "PATIENT_CALLS": str(calls), **environment},
    }
    sampling = {"group_size": AGENTS // 2, "groups_per_step": 2, "max_policy_lag": LAG, "max_attempts": 3}
    return bandit_run(log, "patient", steps, agent=agent, sampling=sampling, runner={"timeout_seconds": 600})


def logged(log: Path, word: str) -> list[Any]:
    """Values that agents logged under a word, from complete lines only."""
    lines = log.read_text().rpartition("\n")[0].splitlines()
    return [line[word] for line in map(json.loads, lines) if word in line]


def until(condition: Callable[[], object], words: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, words
        time.sleep(0.05)


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


def restarts(platform: Platform) -> dict[str, int]:
    """How often each service started again after its death."""
    return {name: service.restarts for name, service in platform.record().services.items()}


@pytest.mark.timeout(900)
def test_agents_get_answers_while_every_service_is_replaced(platform: Platform, client: Client, received: Path) -> None:
    gate = received.with_name("gate")
    # Enough steps for the last runner to have some of them, too.
    run = client.create_run(patient_run(received, 6, calls=2, PATIENT_GATE=str(gate)))
    until(lambda: len(logged(received, "answer")) > 2 * AGENTS, "the agents did not begin")
    before, restarts_before = platform.pids(), restarts(platform)
    *others, runner = SERVICES
    for service in others:
        platform.restart(service)
        enough = len(logged(received, "answer")) + 2 * AGENTS
        until(lambda: len(logged(received, "answer")) >= enough, f"nobody answers after {service} was replaced")  # noqa: B023
        assert logged(received, "error") == [], service
    # The old runner ends when its agents do; its successor runs those of the next steps.
    gate.touch(mode=0o644)
    platform.restart(runner)
    after = platform.pids()
    assert {name for name in before if before[name] == after[name]} == set()
    nobody_noticed(platform, client, run.id, received)
    with psycopg.connect(platform.facts.database_url) as connection:
        owners = "SELECT count(DISTINCT owner) FROM attempts WHERE run_id = %s"
        assert connection.execute(owners, (run.id,)).fetchone() == (2,)
    assert restarts(platform) == restarts_before
