"""Leadership between real controller processes, and the lock beneath it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import psycopg
import pytest

from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.locks import AdvisoryLock, LockLost
from tests.fakes.scripted_engine import ScriptedEngine, running
from tests.support import builders
from tests.support.waiting import eventually


async def test_a_lock_has_one_holder_and_ends_with_its_connection(postgres_dsn: str) -> None:
    first, second = AdvisoryLock(postgres_dsn, "controller"), AdvisoryLock(postgres_dsn, "controller")
    other = AdvisoryLock(postgres_dsn, "trainer:run-a")
    assert [await lock.acquire() for lock in (first, second, other)] == [True, False, True]
    await first.check()
    async with await psycopg.AsyncConnection.connect(postgres_dsn, autocommit=True) as connection:
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND pid <> pg_backend_pid()"
        )
    with pytest.raises(LockLost):
        await first.check()
    await second.release()
    # A server that has ended a connection lets go of its locks a moment later.
    await eventually(second.acquire)
    for lock in (first, second, other):
        await lock.release()
    with pytest.raises(LockLost):
        await first.check()


async def start(
    dsn: str, redis_url: str, engine_url: str, folder: Path, **environment: str
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "leyden.services.controller"),
        env={
            "PATH": os.environ["PATH"],
            "LEYDEN_DATABASE_URL": dsn,
            "LEYDEN_REDIS_URL": redis_url,
            "LEYDEN_LOG_LEVEL": "warning",
            "CONTROLLER_ENGINE_URLS": json.dumps([engine_url]),
            "CONTROLLER_LOG_FOLDER": str(folder),
            "CONTROLLER_TRAINER_COMMAND": json.dumps([sys.executable, "-c", "import time; time.sleep(60)"]),
            **environment,
        },
    )


async def test_a_second_controller_becomes_leader_when_the_first_is_killed(
    database: Database, redis_url: str, tmp_path: Path
) -> None:
    first_run = await _run(database, steps=1)
    async with running(ScriptedEngine()) as engine:
        leader = await start(database.dsn, redis_url, engine.url, tmp_path)
        await eventually(lambda: _admitted(database, first_run))
        waiting = await start(database.dsn, redis_url, engine.url, tmp_path)
        leader.kill()
        await leader.wait()
        async with database.session() as session:
            (await session.get_one(tables.Run, first_run.id)).intent = "cancelled"
        second_run = await _run(database, steps=1)
        await eventually(lambda: _admitted(database, second_run))
        assert engine.weight_version == f"{second_run.id}:0"
        waiting.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await waiting.wait() == 0


async def _run(database: Database, steps: int) -> tables.Run:
    run = await builders.add_run(database, config=builders.run_document(training={"steps": steps}))
    await builders.add_policy_version(database, run, 0)
    return run


async def _admitted(database: Database, run: tables.Run) -> bool:
    async with database.read() as session:
        return await session.get(tables.Group, f"{run.id}.0") is not None
