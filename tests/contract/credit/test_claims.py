"""The claims of credit workers: kept while a worker computes, however long, and soon free when it stands still."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import text

from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.services.credit import worker
from leyden.services.credit.worker import credit_pending, demonstrate_pending
from tests.contract.credit.test_demonstrations import add_source, add_supervised, samples_of
from tests.contract.credit.test_worker import add_complete_group, add_run_with_credit, rows
from tests.support.waiting import eventually, waits_for_a_table

IDLE_SECONDS = 1.0


async def beyond_the_limit(
    database: Database,
    patch: pytest.MonkeyPatch,
    name: str,
    pending: Callable[[Database], Awaitable[Any]],
) -> Any:
    """The result of a worker that computes until another one has twice the time of an idle transaction."""
    computing, released = threading.Event(), threading.Event()
    compute = getattr(worker, name)

    def computes(*arguments: Any) -> Any:
        computing.set()
        assert released.wait(60)
        return compute(*arguments)

    slow = Database(database.dsn, idle_seconds=IDLE_SECONDS)
    try:
        with patch.context() as patched:
            patched.setattr(worker, name, computes)
            first = asyncio.create_task(pending(slow))
            await asyncio.to_thread(computing.wait, 60)
        await asyncio.sleep(2 * IDLE_SECONDS)
        # The claim holds: nobody else computes the same.
        assert not await pending(database)
        released.set()
        return await first
    finally:
        released.set()
        await slow.close()


async def test_a_group_that_computes_longer_than_a_transaction_may_idle_stays_claimed(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = await add_complete_group(database, await add_run_with_credit(database))
    assert await beyond_the_limit(database, monkeypatch, "compute", lambda on: credit_pending(on, 8)) == [group.id]
    assert len(await rows(database, tables.GroupCredit)) == 1


async def test_demonstrations_that_compute_longer_than_a_transaction_may_idle_are_written_once(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = await add_source(database, [[(1.0, (3,))]] * 2)
    run = await add_supervised(database, source)
    assert await beyond_the_limit(database, monkeypatch, "demonstrate", demonstrate_pending) == 2
    assert len(await samples_of(database, run)) == 2


@asynccontextmanager
async def crediting(database: Database, redis_url: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "leyden.services.credit"),
        env={
            **os.environ,
            "LEYDEN_DATABASE_URL": database.dsn,
            "LEYDEN_REDIS_URL": redis_url,
            "LEYDEN_DATABASE_ANSWER_SECONDS": "2",
            "CREDIT_POLL_SECONDS": "0.2",
        },
    )
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_worker_paused_inside_a_transaction_does_not_hold_its_groups(
    database: Database, redis_url: str
) -> None:
    run = await add_run_with_credit(database)
    async with crediting(database, redis_url) as late:
        async with database.session() as session:
            # The worker has computed the group and waits for the row of its verdict.
            await session.execute(text("LOCK TABLE group_credits IN SHARE MODE"))
            group = await add_complete_group(database, run)
            await eventually(lambda: waits_for_a_table(database), "a worker that writes", 60.0)
            late.send_signal(signal.SIGSTOP)
        async with crediting(database, redis_url):
            await eventually(lambda: rows(database, tables.GroupCredit), "the verdict of another worker", 30.0)
        late.send_signal(signal.SIGCONT)
        other = await add_complete_group(database, run, 1)

        async def both() -> bool:
            return len(await rows(database, tables.GroupCredit)) == 2

        await eventually(both, "the next verdict of the first worker", 60.0)
    assert {row.group_id for row in await rows(database, tables.GroupCredit)} == {group.id, other.id}
