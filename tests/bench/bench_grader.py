"""Attempts become grades: leased from Postgres, graded in the pool, and settled; and how long groups wait for it."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import psycopg
from sqlalchemy import func, select, update

from leyden.libs.cli.local.platform import Platform
from leyden.libs.client import Client
from leyden.libs.embedded.servers import EmbeddedRedis
from leyden.libs.service import Checks
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.telemetry import configure_logs
from leyden.services.grader.settings import Settings
from leyden.services.grader.worker import work
from tests.bench.rows import Row
from tests.bench.stored import Stored, process_seconds, stored
from tests.campaigns.soak import QUICK, bandit_run, small_platform
from tests.support import builders
from tests.support.chaos import RunWatch
from tests.support.waiting import eventually

ATTEMPTS, GROUP = 512, 8
COMPONENTS: list[dict[str, Any]] = [
    {"name": "answer", "grader": {"type": "token_f1", "output": "{output.answer}", "reference": "{task.answer}"}},
    {"name": "format", "weight": 0.1, "grader": {"type": "regex", "pattern": '"answer"'}},
    {"name": "words", "weight": 0.0, "grader": {"type": "length", "at_most": 50}},
]
OUTPUT = "it is in Paris, " * 20 + '\n{"answer": "the tall Eiffel Tower"}'
INSTANT = {"components": [{"name": "odd", "grader": {"type": "regex", "pattern": '"odd"'}}]}
STEPS = 6


def rows(repeats: int) -> list[Row]:
    """Grades a minute of CPU time, and the wait of a group for an instant grader."""
    configure_logs("bench", "warning")
    with stored() as store, tempfile.TemporaryDirectory(prefix="bench-redis-") as folder:
        redis = EmbeddedRedis(Path(folder))
        try:
            url = redis.start()
            single, triple = asyncio.run(_rates(store, url, repeats))
        finally:
            redis.stop()
    added, longest = zip(*_waits(repeats), strict=True)
    unit = "grades a CPU minute"
    instant = "a group with an instant grader: from the last agent's end until it is complete, beyond one without"
    return [
        Row("grader", "attempts with one built-in component, all processes", unit, single, at_least=10_000),
        Row("grader", f"attempts with {len(COMPONENTS)} built-in components", unit, triple, at_least=10_000),
        Row("grader", f"{instant}, median", "s", added, at_most=2),
        Row("grader", f"{instant}, the slowest group", "s", longest),
    ]


async def _rates(store: Stored, redis_url: str, repeats: int) -> tuple[list[float], list[float]]:
    database = Database(store.dsn)
    try:
        single = [await _rate(store, database, redis_url, COMPONENTS[:1]) for _ in range(repeats)]
        triple = [await _rate(store, database, redis_url, COMPONENTS) for _ in range(repeats)]
    finally:
        await database.close()
    return single, triple


async def _rate(store: Stored, database: Database, redis_url: str, components: list[dict[str, Any]]) -> float:
    """Grades a minute of CPU time of the service, its pool and Postgres together, from waiting attempts to totals."""
    run = await _fill(database, components)
    settings = Settings(database_url=store.dsn, redis_url=redis_url, processes=1)
    stop = asyncio.Event()
    before = time.process_time() + store.cpu_seconds()
    working = asyncio.create_task(work(settings, stop, Checks()))
    pools: dict[int, float] = {}

    async def is_settled() -> bool:
        pools.update({child.pid: process_seconds(child.pid) for child in psutil.Process().children()})
        async with database.read() as session:
            settled = select(func.count()).where(tables.Grading.run_id == run.id, tables.Grading.total.is_not(None))
            return await session.scalar(settled) == ATTEMPTS

    try:
        await eventually(is_settled, seconds=300)
        busy = time.process_time() + store.cpu_seconds() - before + sum(pools.values())
    finally:
        stop.set()
        await working
    return 60 * ATTEMPTS * len(components) / busy


async def _fill(database: Database, components: list[dict[str, Any]]) -> tables.Run:
    """Groups whose attempts have succeeded and wait for their grades."""
    dataset = await builders.add_dataset(database, [{"answer": "Eiffel Tower"}], name=f"d{time.time_ns()}")
    config = builders.run_document(reward={"components": components})
    run = await builders.add_run(database, dataset_id=dataset.id, config=config)
    for number in range(ATTEMPTS // GROUP):
        _, rollouts = await builders.add_group(database, run, number, size=GROUP)
        for rollout in rollouts:
            await builders.add_attempt(database, rollout, state="settled", finished_at=datetime.now(tz=UTC))
            await builders.add_outcome(database, rollout, reward=None, stdout_tail=OUTPUT)
    async with database.session() as session:
        await session.execute(update(tables.Rollout).where(tables.Rollout.run_id == run.id).values(grading_attempt=1))
    return run


def _waits(repeats: int) -> Iterator[tuple[float, float]]:
    """For each repeat, the median and the longest wait of a graded run's groups, beyond the median without a grader."""
    with tempfile.TemporaryDirectory(prefix="bench-grader-") as folder:
        log = Path(folder) / "received.log"
        log.touch()
        with (
            small_platform(Path(folder)) as platform,
            Client(platform.facts.url("api"), platform.token, patience_seconds=60) as client,
        ):
            client.upload_dataset("bandit", [{"number": number} for number in range(16)])
            for repeat in range(repeats):
                plain = _waits_of(platform, client, bandit_run(log, f"plain-{repeat}", STEPS, **QUICK))
                document = bandit_run(log, f"graded-{repeat}", STEPS, reward=INSTANT, **QUICK)
                document["agent"]["environment"]["BANDIT_SILENT"] = "1"
                graded = _waits_of(platform, client, document)
                usual = statistics.median(plain)
                yield statistics.median(graded) - usual, max(graded) - usual


def _waits_of(platform: Platform, client: Client, document: dict[str, Any]) -> list[float]:
    """Seconds from the last outcome of each group to its completion."""
    run = client.create_run(document)
    watch = RunWatch(platform, run.id)
    assert watch.wait_for_end(300) and watch.phase == "completed", watch.phase
    with contextlib.closing(psycopg.connect(platform.facts.database_url)) as connection:
        found = connection.execute(
            "SELECT extract(epoch FROM g.finished_at - max(o.created_at)) FROM groups g"
            " JOIN rollouts r ON r.group_id = g.id JOIN outcomes o ON o.rollout_id = r.id AND o.attempt = r.attempt"
            " WHERE g.run_id = %s AND g.state = 'complete' GROUP BY g.id",
            [run.id],
        ).fetchall()
    assert found, "no group is complete"
    return [float(seconds) for (seconds,) in found]
