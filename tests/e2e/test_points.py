"""A training goes on while every service is killed at its worst moments, one after the other and several at once.

Afterwards the store holds each answer and reward that the agents received exactly once.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from leyden.libs.cli.local import managed_service
from leyden.libs.cli.local.platform import Platform
from leyden.libs.client import Client
from leyden.libs.contracts.api.runs import EvaluationRequest
from leyden.libs.faults import FaultInjector
from tests.campaigns.soak import small_platform
from tests.invariants import violations
from tests.support.long import long_only
from tests.support.shared import open_to_agents

AGENT = Path(__file__).parents[1] / "agents" / "witness.py"
POINTS = {
    "gateway": ["answered", "recorded", "streamed"],
    "runner": ["delivered", "leased", "started", "ended", "attempt_ended", "settled"],
    "collector": ["spans_written", "committed"],
    "credit": ["computed", "written", "committed"],
    "controller": [
        *("groups_completed", "committed", "groups_written", "admitted", "enqueued"),
        *("version_noticed", "engine_paused", "engine_loaded"),
    ],
    "engine": ["weights_read", "weights_swapped"],
    "trainer": ["saved", "committed"],
}
API_POINTS = ("api.created", "api.committed")
FIRE_SECONDS = 240.0
STEPS = 12


@pytest.fixture
def injector(tmp_path: Path) -> FaultInjector:
    return FaultInjector(tmp_path / "faults")


@pytest.fixture
def platform(tmp_path: Path, injector: FaultInjector, monkeypatch: pytest.MonkeyPatch) -> Iterator[Platform]:
    # A service that dies at one point after the other would wait for ten seconds in the end.
    monkeypatch.setattr(managed_service, "MAX_BACKOFF_SECONDS", 0.5)
    quick = {"RUNNER_LEASE_SECONDS": "4", "RUNNER_CONCURRENCY": "8", "CONTROLLER_RETRY_SECONDS": "0.1"}
    with small_platform(tmp_path, **injector.environment, **quick) as running:
        yield running


class Trainings:
    """Runs of the witness, one after another, for as long as somebody waits for something to happen in one."""

    def __init__(self, client: Client, log: Path) -> None:
        self._client, self._log = client, log
        self.ids: list[str] = []

    def more(self) -> None:
        """Begins another run."""
        self.ids.append(self._client.create_run(self._document(f"witnessed-{len(self.ids)}")).id)

    def continue_training(self) -> None:
        """Begins another run where the last one has ended."""
        if self._client.run(self.ids[-1]).phase == "completed":
            self.more()

    def phases(self) -> list[tuple[str, str | None]]:
        """The phase of each run and its reason."""
        return [(run.phase, run.reason) for run in map(self._client.run, self.ids)]

    def end(self, seconds: float = 400.0) -> None:
        """Waits until every run is over."""
        deadline = time.monotonic() + seconds
        for run_id in self.ids:
            while self._client.run(run_id).phase not in {"completed", "failed"} and time.monotonic() < deadline:
                time.sleep(0.2)

    def _document(self, name: str) -> dict[str, object]:
        agent = {
            "command": [sys.executable, "-I", "-S", str(AGENT)],
            "environment": {"WITNESS_LOG": str(open_to_agents(self._log))},
        }
        return {
            "name": name,
            "dataset": "bandit",
            "agent": agent,
            "runner": {"timeout_seconds": 120, "grant_reward": True},
            "sampling": {"group_size": 4, "groups_per_step": 2, "max_attempts": 20},
            "optimizer": {"learning_rate": 0.001},
            "training": {"steps": STEPS},
        }


def fire(injector: FaultInjector, trainings: Trainings) -> None:
    """Returns when a process has died at each of the points; at every moment each service has one before it."""
    ahead = {service: [f"{service}.{moment}" for moment in moments] for service, moments in POINTS.items()}
    for points in ahead.values():
        injector.arm(points[0])
    deadline = time.monotonic() + FIRE_SECONDS
    while any(ahead.values()):
        for points in ahead.values():
            if points and injector.fired(points[0], 0.0):
                deadline = time.monotonic() + FIRE_SECONDS
                del points[0]
                if points:
                    injector.arm(points[0])
        assert time.monotonic() < deadline, f"nobody passed {ahead}, runs: {trainings.phases()}"
        trainings.continue_training()
        time.sleep(0.2)


@long_only
@pytest.mark.timeout(900)
def test_every_service_is_killed_at_its_worst_moments_and_nothing_is_lost_or_doubled(
    platform: Platform, client: Client, injector: FaultInjector, tmp_path: Path
) -> None:
    log = tmp_path / "witness.log"
    log.touch()
    trainings = Trainings(client, log)
    creations = (trainings.more, lambda: client.evaluate_run(trainings.ids[0], EvaluationRequest(max_tasks=2)))
    for point, create in zip(API_POINTS, creations, strict=True):
        injector.arm(point)
        create()
        assert injector.fired(point, 0.0)
    fire(injector, trainings)
    trainings.end()

    runs = {run.id: run for run in client.runs()}
    assert sorted(runs) == sorted(trainings.ids)
    [evaluation] = client.evaluations(trainings.ids[0])
    assert evaluation.results.complete
    assert [(runs[run_id].phase, runs[run_id].reason) for run_id in trainings.ids] == [
        ("completed", None) for _ in trainings.ids
    ]
    for run_id in trainings.ids:
        assert violations(platform.facts.database_url, run_id) == {}
        assert [version.version for version in client.policies(run_id)] == list(range(STEPS + 1))
    # What was asked of the store was asked of calls that continue others, too.
    with psycopg.connect(platform.facts.database_url) as connection:
        assert connection.execute("SELECT count(parent_call_id) > 0 FROM model_calls").fetchone() == (True,)
    logged, stored = rows_in_the_agents_log(log), rows_in_the_store(platform.facts.database_url)
    assert logged["answer"] - stored["answer"] == Counter()
    assert logged["span"] - stored["span"] == Counter()
    assert logged["reward"] - stored["reward"] == Counter()
    for attempt in succeeded(platform.facts.database_url):
        held = {kind: sum(n for (who, _), n in stored[kind].items() if who == attempt) for kind in stored}
        assert (attempt, held) == (attempt, {"answer": 2, "span": 2, "reward": 1})


Rows = dict[str, Counter[tuple[tuple[str, int], str]]]


def rows_in_the_agents_log(log: Path) -> Rows:
    """By kind: (rollout and attempt, id) and how often it was written down."""
    logged: Rows = {"answer": Counter(), "span": Counter(), "reward": Counter()}
    for line in log.read_text().splitlines():
        entry = json.loads(line)
        logged[entry["kind"]][(entry["who"][0], entry["who"][1]), entry["id"].removeprefix("chatcmpl-")] += 1
    return logged


def rows_in_the_store(dsn: str) -> Rows:
    """The same, as rows."""
    tables = {
        "answer": "SELECT rollout_id, attempt, request_id FROM model_calls WHERE status = 'completed'",
        "span": "SELECT rollout_id, attempt, span_id FROM spans",
        "reward": "SELECT rollout_id, attempt, key FROM rewards",
    }
    with psycopg.connect(dsn) as connection:
        rows = {kind: connection.execute(statement).fetchall() for kind, statement in tables.items()}
    return {
        kind: Counter(((rollout, attempt), name) for rollout, attempt, name in found) for kind, found in rows.items()
    }


def succeeded(dsn: str) -> list[tuple[str, int]]:
    """Attempts whose verdict counts."""
    with psycopg.connect(dsn) as connection:
        rows = connection.execute("SELECT id, attempt FROM rollouts WHERE state = 'finished' ORDER BY id").fetchall()
    return [(rollout, attempt) for rollout, attempt in rows]
