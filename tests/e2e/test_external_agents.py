"""Agents that the platform does not start: a notebook's loop and a service with one base URL learn like any other."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from leyden.libs.cli.local import managed_service
from leyden.libs.cli.local.platform import Platform
from leyden.libs.client import Client, RunEnded
from leyden.libs.contracts.api.runs import Run
from leyden.libs.contracts.api.tokens import ApiScope
from leyden.libs.faults import FaultInjector
from tests.campaigns.soak import QUICK, bandit_run, small_platform
from tests.invariants import lost_calls, violations
from tests.support.chaos import ENDED, kill
from tests.support.long import long_only
from tests.support.shared import ROOT
from tests.support.waiting import until

STEPS = 26
AT_ONCE = 8
POINTS = ("api.leased", "api.ended")
OWNERS = "SELECT DISTINCT split_part(owner, '/', 1) FROM attempts WHERE run_id = %s"
FINISHED = "SELECT count(*) FROM rollouts WHERE run_id = %s AND state = 'finished'"


def external_run(log: Path, name: str, length: int, **sections: dict[str, Any]) -> dict[str, Any]:
    """The bandit's run, whose agents nobody of the platform starts."""
    runner = {"type": "external", "timeout_seconds": 120, **sections.pop("runner", {})}
    return bandit_run(log, name, length, **QUICK, **sections) | {"agent": {}, "runner": runner}


@contextmanager
def notebook(platform: Platform, token: str, run: Run, log: Path, at_once: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that leases the run's attempts and plays them."""
    arguments = [platform.facts.url("api"), token, run.id, str(at_once), str(log)]
    command = [sys.executable, "-m", "tests.agents.notebook", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def service(platform: Platform, log: Path) -> Iterator[str]:
    """The agent as a service; its address."""
    environment = {**os.environ, "OPENAI_BASE_URL": f"{platform.facts.url('gateway')}/v1"}
    command = [sys.executable, "-m", "tests.agents.service", str(log)]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def until_ended(client: Client, run_id: str) -> Run:
    return until(lambda: (run := client.run(run_id)).phase in ENDED and run, "the end of the run", 840)


def assert_learned(platform: Platform, client: Client, run: Run, log: Path) -> None:
    assert (run.phase, run.reason) == ("completed", None)
    before, after = (e.results.reward for e in sorted(client.evaluations(run.id), key=lambda e: e.number))
    assert before is not None and after is not None
    assert 0.2 < before.mean < 0.8 and after.mean > 0.9
    assert_whole(platform, run, log)


def assert_whole(platform: Platform, run: Run, log: Path) -> None:
    """Nothing is lost or doubled, and no runner had one of the attempts."""
    dsn = platform.facts.database_url
    assert violations(dsn, run.id) == {}
    assert lost_calls(dsn, run.id, log) == []
    with psycopg.connect(dsn) as connection:
        assert connection.execute(OWNERS, [run.id]).fetchall() == [("notebook",)]


@long_only
@pytest.mark.timeout(900)
def test_a_run_whose_attempts_all_come_from_a_notebook_learns(
    platform: Platform, client: Client, received: Path
) -> None:
    # A right for attempts alone is enough.
    token = client.create_token("notebook", [ApiScope.ATTEMPTS]).token
    evaluation = {"dataset": "bandit", "rollouts_per_task": 4}
    created = client.create_run(external_run(received, "notebook", STEPS, evaluation=evaluation))
    with notebook(platform, token, created, received, AT_ONCE) as process:
        run = until_ended(client, created.id)
        assert process.wait(60) == 0
    assert_learned(platform, client, run, received)


@long_only
@pytest.mark.timeout(900)
async def test_a_service_that_reads_its_base_url_once_learns_from_attempts_at_once(
    platform: Platform, client: Client, received: Path
) -> None:
    evaluation = {"dataset": "bandit", "rollouts_per_task": 4}
    created = client.create_run(external_run(received, "service", STEPS, evaluation=evaluation))

    async def drive(http: httpx.AsyncClient) -> None:
        while True:
            try:
                async with client.attempt(created.id, worker="notebook") as attempt:
                    asked = {"rollout": attempt.leased.rollout_id, "attempt": attempt.leased.number}
                    headers = {"authorization": f"Bearer {attempt.api_key}"}
                    answer = await http.post("/", json=asked, headers=headers)
                    attempt.reward = answer.raise_for_status().json()["reward"]
            except RunEnded:
                return

    with service(platform, received) as url:
        async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as http:
            await asyncio.gather(*(drive(http) for _ in range(AT_ONCE)))
    assert_learned(platform, client, await asyncio.to_thread(until_ended, client, created.id), received)


@pytest.fixture
def injector(tmp_path: Path) -> FaultInjector:
    return FaultInjector(tmp_path / "faults")


@pytest.fixture
def fragile(tmp_path: Path, injector: FaultInjector, monkeypatch: pytest.MonkeyPatch) -> Iterator[Platform]:
    monkeypatch.setattr(managed_service, "MAX_BACKOFF_SECONDS", 0.5)
    with small_platform(tmp_path, **injector.environment, CONTROLLER_RETRY_SECONDS="0.1") as running:
        yield running


@long_only
@pytest.mark.timeout(900)
def test_kills_of_clients_gateway_and_api_lose_and_double_nothing(
    fragile: Platform, injector: FaultInjector, received: Path
) -> None:
    token, dsn = fragile.token, fragile.facts.database_url

    def finished(run: Run) -> int:
        with psycopg.connect(dsn) as connection:
            row = connection.execute(FINISHED, [run.id]).fetchone()
        return int(row[0]) if row else 0

    def progress(run: Run) -> None:
        before = finished(run)
        until(lambda: finished(run) >= before + 4, "the attempts go on", 240)

    with Client(fragile.facts.url("api"), token, patience_seconds=60) as client:
        client.upload_dataset("bandit", [{"number": number} for number in range(16)])
        document = external_run(received, "fragile", 40, runner={"lease_seconds": 5.0})
        run = client.create_run(document)
        with notebook(fragile, token, run, received, 4) as lasting:
            with notebook(fragile, token, run, received, 4) as victim:
                progress(run)
                victim.kill()
            progress(run)
            with notebook(fragile, token, run, received, 2):
                for point in POINTS:
                    injector.arm(point)
                    assert injector.fired(point, 240)
                    progress(run)
                for victim_service in ("gateway", "api"):
                    assert kill(fragile, victim_service, run.id)
                    progress(run)
            client.cancel_run(run.id)
            ended = until_ended(client, run.id)
            assert lasting.wait(60) == 0
    assert ended.phase == "cancelled"
    assert_whole(fragile, ended, received)
