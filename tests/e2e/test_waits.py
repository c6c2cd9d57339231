"""The platform's waits are never the agent's failure, whatever ended the attempt, and however late the records come."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from leyden.libs.cli.local.platform import Platform
from leyden.libs.client import Client
from tests.campaigns.soak import bandit_run
from tests.invariants import violations
from tests.support.chaos import pid_of
from tests.support.long import long_only
from tests.support.shared import open_to_agents
from tests.support.waiting import until

HASTY = Path(__file__).parents[1] / "agents" / "hasty.py"
SMALL = {"group_size": 4, "groups_per_step": 1, "max_attempts": 20}
TIMEOUT_SECONDS = 20
JUDGED = """
    SELECT count(*) FROM rollouts r JOIN outcomes o ON o.rollout_id = r.id AND o.attempt = 1
    WHERE r.run_id = %s AND (r.excused_attempt >= 1 OR r.state <> 'queued')"""
FIRST = """
    SELECT r.sibling, o.kind, r.excused_attempt >= 1 AS excused FROM rollouts r
    JOIN outcomes o ON o.rollout_id = r.id AND o.attempt = 1
    WHERE r.run_id = %s AND r.group_id = %s ORDER BY r.sibling"""


class Store:
    """Reads the platform's database."""

    def __init__(self, dsn: str, run_id: str) -> None:
        self._dsn, self._run_id = dsn, run_id

    def rows(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self._dsn) as connection:
            return connection.execute(statement.encode(), (self._run_id, *values)).fetchall()

    def count(self, statement: str) -> int:
        return int(self.rows(statement)[0][0])


@contextmanager
def stopped_engine(platform: Platform, run_id: str) -> Iterator[None]:
    """The engine stands still inside the block: it takes connections and says nothing."""
    pid = pid_of(platform, "engine", run_id)
    assert pid is not None
    process = psutil.Process(pid)
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def finish(platform: Platform, client: Client, run_id: str) -> None:
    until(lambda: client.run(run_id).phase in {"completed", "failed"}, "the end of the run")
    assert violations(platform.facts.database_url, run_id) == {}


@long_only
@pytest.mark.timeout(600)
def test_a_timeout_that_waited_for_an_engine_is_ours_though_its_record_comes_late(
    platform: Platform, client: Client, received: Path
) -> None:
    log = {"BANDIT_LOG": str(open_to_agents(received)), "BANDIT_TOOL_SECONDS": "6"}
    agent = {"environment": log}
    document = bandit_run(received, "waits", 1, runner={"timeout_seconds": TIMEOUT_SECONDS}, sampling=SMALL)
    document["agent"] |= agent
    run = client.create_run(document)
    store = Store(platform.facts.database_url, run.id)
    until(lambda: store.count("SELECT count(*) FROM model_calls WHERE run_id = %s") >= 4, "the first calls")
    with stopped_engine(platform, run.id):
        (began,) = store.rows("SELECT max(started_at) FROM attempts WHERE run_id = %s")[0]
        time.sleep(max(0.0, began.timestamp() + TIMEOUT_SECONDS - 1.5 - time.time()))
        with psycopg.connect(platform.facts.database_url) as connection:
            connection.execute("LOCK TABLE model_calls IN EXCLUSIVE MODE")
            time.sleep(6)
            connection.rollback()
        until(lambda: store.count(JUDGED) >= 4, "the controller judges the first attempts", 60)
        first = store.rows(FIRST, f"{run.id}.0")
    assert first == [(sibling, "timeout", True) for sibling in range(4)]
    finish(platform, client, run.id)


@long_only
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stop_seconds", [6.0, 30.0])
def test_a_client_that_gives_up_on_a_slow_engine_gets_its_answer_or_is_tried_again(
    platform: Platform, client: Client, tmp_path: Path, received: Path, stop_seconds: float
) -> None:
    folder = open_to_agents(tmp_path / "gate.log").parent
    gate = folder / "gate"
    agent = {"command": ["{python}", "-I", "-S", str(HASTY)], "environment": {"HASTY_GATE": str(gate)}}
    run = client.create_run(bandit_run(received, "hasty", 1, agent=agent, sampling=SMALL))
    store = Store(platform.facts.database_url, run.id)
    running = "SELECT count(*) FROM attempts WHERE run_id = %s AND state = 'running'"
    until(lambda: store.count(running) >= 4, "four agents")
    with stopped_engine(platform, run.id):
        gate.touch()
        time.sleep(stop_seconds)
    until(lambda: store.count(JUDGED) >= 4, "the controller judges the first attempts", 60)
    first = store.rows(FIRST, f"{run.id}.0")
    if stop_seconds < 10:
        assert first == [(sibling, "succeeded", False) for sibling in range(4)]
    else:
        kinds = ["agent_error", "succeeded", "agent_error", "succeeded"]
        assert first == [(sibling, kind, True) for sibling, kind in enumerate(kinds)]
    finish(platform, client, run.id)
