"""The platform as a user feels it: start, memory at rest, rollouts a second, and new weights on their way to agents."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import numpy as np
import psutil
import psycopg
from sqlalchemy import select

from leyden.libs.cli.local.platform import Options, Platform
from leyden.libs.cli.local.record import read_record
from leyden.libs.cli.local.services import ENGINE_KEY, SERVICES
from leyden.libs.client import Client
from leyden.libs.contracts.api.runs import EvaluationRequest
from leyden.libs.queue.notifications import Notifications, Topic
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.services.engine.convert import convert
from tests.bench.rows import Row
from tests.campaigns.growth import AGENT, stubbed_platform
from tests.support import builders
from tests.support.waiting import until

REST_SECONDS = 2.0
WAIT_SECONDS = 300.0
TASKS, SIBLINGS = 32, 8
OUTCOME = 'echo "{\\"reward\\": $((${LEYDEN_ROLLOUT_ID##*.} % 2))}"'
COMMAND = f"case $LEYDEN_TASK in *quiet*) {OUTCOME};; *) exec bash {AGENT};; esac"
CALLS = {"quiet": 0, "asking": 1}
"""Model calls of one rollout by dataset."""
STREAMS, PROMPT_TOKENS, NEW_TOKENS = 4, 240, 16
SHARED_TOKENS, OWN_TOKENS = 400, 80


def rows(repeats: int) -> list[Row]:
    """Start and memory, rollouts, and steps of SmolLM2-135M."""
    starts, memory = zip(*_starts(repeats), strict=True)
    quiet, asking = zip(*_rollouts(repeats), strict=True)
    steps, delays, waits = zip(*_steps(repeats), strict=True)
    trained = f"135M: a step over {SIBLINGS} samples of {SHARED_TOKENS + OWN_TOKENS} tokens that share {SHARED_TOKENS}"
    return [
        Row("platform", "`leyden up` until it is ready, in a home that exists", "s", starts, at_most=10),
        Row("platform", "memory of all processes at rest", "MB", memory, at_most=1500),
        Row("platform", "agents that print an outcome", "rollouts/s", quiet, at_least=60),
        Row("platform", "agents that ask the model once", "rollouts/s", asking, at_least=60),
        Row("platform", trained, "s", steps),
        Row("platform", "135M: from the step's end to a token of its weights", "s", delays, at_most=5),
        Row("platform", f"135M: longest extra wait of a call meanwhile, {STREAMS} at once", "s", waits, at_most=2),
    ]


def _starts(repeats: int) -> Iterator[tuple[float, float]]:
    """Seconds until ready, and megabytes at rest."""
    # Converts the model if needed, which a start would wait for.
    convert()
    with tempfile.TemporaryDirectory(prefix="bench-start-") as folder:
        home = Path(folder) / "home"
        with _up(home):
            pass
        for _ in range(repeats):
            with _up(home) as (seconds, supervisor):
                time.sleep(REST_SECONDS)
                yield seconds, sum(map(_megabytes, _processes(home, supervisor)))


@contextlib.contextmanager
def _up(home: Path) -> Iterator[tuple[float, int]]:
    """`leyden up`: seconds until it is ready, and its pid; stopped after the block."""
    began = time.monotonic()
    command = [sys.executable, "-m", "leyden.libs.cli", "up", "--silent", "--free-ports", "--home", str(home)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stderr is not None
            assert any("ready;" in line for line in process.stderr), f"not ready: see {home}"
            yield time.monotonic() - began, process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=120)


def _processes(home: Path, supervisor: int) -> set[int]:
    record = read_record(home)
    assert record is not None and tuple(record.services) == SERVICES
    files = (home / "postgres/data/postmaster.pid", home / "redis/redis.pid")
    roots = [supervisor, *(int(file.read_text().split()[0]) for file in files)]
    return {one.pid for pid in roots for one in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True))}


def _megabytes(pid: int) -> float:
    """Proportional set size."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
        return int(found[1]) * 1024 / 1e6 if found else 0.0
    return 0.0


def _rollouts(repeats: int) -> Iterator[tuple[float, float]]:
    """Rollouts a second of evaluations, so that nothing trains meanwhile; a scripted engine answers at once."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-rollouts-") as folder,
        stubbed_platform(Path(folder)) as platform,
        Client(platform.facts.url("api"), platform.token) as client,
    ):
        run_id = _trained_run(client)
        _evaluate(platform, client, run_id, "asking")
        for _ in range(repeats):
            yield _evaluate(platform, client, run_id, "quiet"), _evaluate(platform, client, run_id, "asking")


def _trained_run(client: Client) -> str:
    """A run that has made its one step."""
    for name in CALLS:
        client.upload_dataset(name, [{"number": number, "agent": name} for number in range(TASKS)])
    document = {
        "name": "rollouts",
        "dataset": "asking",
        "agent": {"command": ["sh", "-c", COMMAND]},
        "runner": {"timeout_seconds": 60},
        "sampling": {"group_size": SIBLINGS, "groups_per_step": 1},
        # The scripted engine invents its log-probabilities.
        "training": {"steps": 1, "max_logprob_gap": 100.0, "min_effective_share": 0.0},
    }
    run_id = client.create_run(document).id
    until(lambda: client.run(run_id).phase == "completed")
    return run_id


def _evaluate(platform: Platform, client: Client, run_id: str, dataset: str) -> float:
    """Rollouts a second, from the first admission to the last end.

    Raises: AssertionError: a rollout has not the outcome, the reward or the calls that it should have
    """
    request = EvaluationRequest(dataset=dataset, max_tasks=TASKS, rollouts_per_task=SIBLINGS, policy_version=1)
    evaluation = client.evaluate_run(run_id, request).id
    with psycopg.connect(platform.facts.database_url, autocommit=True) as connection:
        complete = "SELECT count(*) FROM groups WHERE evaluation_id = %s AND state = 'complete'"
        until(lambda: connection.execute(complete, (evaluation,)).fetchone() == (TASKS,))
        row = connection.execute(
            "SELECT count(*) FILTER (WHERE r.state = 'finished' AND r.reward = r.sibling %% 2"
            " AND (SELECT count(*) FROM model_calls c WHERE c.run_id = r.run_id AND c.rollout_id = r.id"
            " AND c.status = 'completed') = %s),"
            " extract(epoch FROM max(r.finished_at) - min(r.created_at))::float8"
            " FROM rollouts r JOIN groups g ON g.id = r.group_id WHERE g.evaluation_id = %s",
            (CALLS[dataset], evaluation),
        ).fetchone()
    assert row is not None and row[0] == TASKS * SIBLINGS, row
    return TASKS * SIBLINGS / float(row[1])


def _steps(repeats: int) -> list[tuple[float, float, float]]:
    """Seconds of a step, from its end to a token of its weights, and the longest extra wait of a call."""
    with tempfile.TemporaryDirectory(prefix="bench-steps-", ignore_cleanup_errors=True) as folder:
        options = Options(model_path=convert(), free_ports=True, services=("engine", "controller"))
        platform = Platform(Path(folder) / "home", options)
        platform.start()
        try:
            platform.ready(300)
            return asyncio.run(_train(platform, repeats))
        finally:
            platform.stop()


async def _train(platform: Platform, repeats: int) -> list[tuple[float, float, float]]:
    database = Database(platform.facts.database_url)
    notifications = Notifications(platform.facts.redis_url)
    document = builders.run_document(
        sampling={"group_size": SIBLINGS, "groups_per_step": 1, "max_policy_lag": 0},
        # A run ends with its last version, which nobody needs to be served.
        training={"steps": repeats + 2, "max_logprob_gap": 100.0, "min_effective_share": 0.0},
    )
    key = (platform.home / ENGINE_KEY).read_text().strip()
    try:
        run = await builders.add_run(database, config=document)
        await notifications.notify(Topic.RUNS)
        await _served(database, run.id)
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {key}"}) as http:
            calls = _Calls(http, platform.facts.url("engine"))
            found = []
            for version in range(1, repeats + 2):
                found.append(await _step(database, notifications, run, version, calls))
        # The first step loads the model.
        return found[1:]
    finally:
        await notifications.close()
        await database.close()


async def _served(database: Database, run_id: str) -> None:
    """Returns when the engine serves the run's base model."""
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            async with database.read() as session:
                engines = (await session.scalars(select(tables.Engine))).all()
            if any((one.run_id, one.policy_version) == (run_id, 0) for one in engines):
                return
            await asyncio.sleep(0.1)


class _Calls:
    """Clients that call the engine one after another; each answer's end, seconds, and newest weight version."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self.answers: list[tuple[float, float, str]] = []
        self._http, self._url = http, url

    async def repeat(self, seed: int) -> None:
        """Calls until it is cancelled."""
        rng = np.random.default_rng(seed)
        sampling = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True, "temperature": 1.0}
        while True:
            body = {"input_ids": rng.integers(10, 40000, PROMPT_TOKENS).tolist(), "sampling_params": sampling}
            began = time.time()
            async with self._http.post(f"{self._url}/generate", json=body) as response:
                answer = await response.json()
                assert response.status == 200, answer
            self.answers.append(
                (time.time(), time.time() - began, answer["meta_info"]["weight_versions"][-1]["version"])
            )


async def _step(
    database: Database, notifications: Notifications, run: tables.Run, version: int, calls: _Calls
) -> tuple[float, float, float]:
    """Gives the trainer one group and waits for a token of the version that its step makes."""
    calls.answers.clear()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(calls.repeat(seed)) for seed in range(STREAMS)]
        await asyncio.sleep(REST_SECONDS)
        await _add_group(database, run, version)
        await notifications.notify(Topic.SAMPLES)
        deadline = time.monotonic() + WAIT_SECONDS
        while not any(served == f"{run.id}:{version}" for _, _, served in calls.answers):
            assert time.monotonic() < deadline, f"version {version} was never served"
            await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
    async with database.read() as session:
        step = await session.get_one(tables.Step, (run.id, version))
    phases = ("load_seconds", "gradients_seconds", "optimizer_seconds")
    ended = step.started_at.timestamp() + sum(step.metrics[phase] for phase in phases)
    first = min(end for end, _, served in calls.answers if served == f"{run.id}:{version}")
    meanwhile = [seconds for end, seconds, _ in calls.answers if end > ended]
    usual = statistics.median(seconds for _, seconds, _ in calls.answers)
    return ended - step.started_at.timestamp(), first - ended, max(0.0, max(meanwhile) - usual)


async def _add_group(database: Database, run: tables.Run, version: int) -> None:
    rng = np.random.default_rng(version)
    admitted = version - 1
    group, rollouts = await builders.add_group(database, run, 1000 + version, size=SIBLINGS, admitted_version=admitted)
    shared = rng.integers(10, 40000, SHARED_TOKENS).tolist()
    for sibling, rollout in enumerate(rollouts):
        columns = {"advantage": (-1.0) ** sibling, "policy_version": admitted}
        await builders.add_sample(database, rollout, shared, rng.integers(10, 40000, OWN_TOKENS).tolist(), **columns)
    await builders.add_credited_group(database, group, min_policy_version=admitted)
