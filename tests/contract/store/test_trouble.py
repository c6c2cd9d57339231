"""Sessions, locks and the writing of calls raise StoreAway while Postgres is silent, read-only or disconnected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import psycopg
import pytest
from sqlalchemy import text

from leyden.libs.store.database import BadValue, Database, Refused, StoreAway, connect
from leyden.libs.store.locks import AdvisoryLock, LockLost
from leyden.libs.store.records.calls import write_calls
from tests.faults.proxy import FaultProxy, Trouble

SILENCE_SECONDS = 1.5


@pytest.fixture
def proxy(postgres_dsn: str) -> Iterator[FaultProxy]:
    with FaultProxy.of(postgres_dsn) as running:
        yield running


@pytest.fixture
def dsn(proxy: FaultProxy, postgres_dsn: str) -> str:
    return proxy.url(postgres_dsn)


@pytest.fixture
async def behind(dsn: str) -> AsyncIterator[Database]:
    """A database whose every statement passes the proxy."""
    opened = Database(dsn, "leyden-tests", answer_seconds=SILENCE_SECONDS)
    yield opened
    await opened.close()


async def say(database: Database, trouble: Callable[[], object]) -> None:
    """A transaction in whose middle there is trouble."""
    async with database.session() as session:
        await session.execute(text("SELECT 1"))
        trouble()
        await session.execute(text("SELECT 2"))


async def test_a_silent_server_counts_as_down_and_the_next_session_works_after_recovery(
    behind: Database, proxy: FaultProxy
) -> None:
    with pytest.raises(StoreAway) as away:
        await say(behind, lambda: setattr(proxy, "trouble", Trouble(hang=True)))
    assert str(away.value) == "Postgres did not answer within 2.5 s, so the connection was closed"
    proxy.heal()
    await behind.ping()


async def test_a_cancelled_wait_ends_at_once_and_closes_only_its_connection(
    behind: Database, proxy: FaultProxy
) -> None:
    await behind.ping()
    proxy.trouble = Trouble(hang=True)
    async with asyncio.timeout(60):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await behind.ping()
    proxy.heal()
    await behind.ping()


async def test_a_connection_that_is_cancelled_while_it_opens_is_closed_at_once() -> None:
    asked, closed = asyncio.Event(), asyncio.Event()

    async def ignore(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        asked.set()
        await reader.read()
        closed.set()
        writer.close()

    async with await asyncio.start_server(ignore, "127.0.0.1") as server:
        port = server.sockets[0].getsockname()[1]
        opening = asyncio.create_task(connect(f"postgresql://leyden@127.0.0.1:{port}/leyden", answer_seconds=60))
        await asked.wait()
        opening.cancel()
        with pytest.raises(asyncio.CancelledError) as cancelled:
            await opening
        # A server waits a minute for the rest of a handshake, and DROP DATABASE meanwhile for the server's process.
        async with asyncio.timeout(60):
            await closed.wait()
        assert cancelled.tb is not None


async def test_connections_that_were_cut_are_replaced(behind: Database, proxy: FaultProxy) -> None:
    with pytest.raises(StoreAway):
        await say(behind, proxy.cut)
    await behind.ping()


async def test_a_commit_whose_answer_was_lost_is_no_success(
    behind: Database, proxy: FaultProxy, postgres_dsn: str
) -> None:
    async with behind.session() as session:
        await session.execute(text("CREATE TABLE noted (number integer PRIMARY KEY)"))
    proxy.trouble = Trouble(cut_at=b"COMMIT", cut_answer=True)
    with pytest.raises(StoreAway):
        async with behind.session() as session:
            await session.execute(text("INSERT INTO noted VALUES (1)"))
    proxy.heal()
    with pytest.raises(Refused):
        async with behind.session() as session:
            await session.execute(text("INSERT INTO noted VALUES (1)"))


async def test_a_server_that_became_read_only_counts_as_down(behind: Database, postgres_dsn: str) -> None:
    name = postgres_dsn.rpartition("/")[2]
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on".encode())
    with pytest.raises(StoreAway) as away:
        await behind.ping()
    assert "session is read-only" in str(away.value)


async def test_postgres_shows_who_is_connected_and_errors_never_show_parameters(behind: Database) -> None:
    async with behind.read() as session:
        assert await session.scalar(text("SHOW application_name")) == "leyden-tests"
    with pytest.raises(BadValue) as refused:
        async with behind.read() as session:
            await session.execute(text("SELECT CAST(:prompt AS text), 1/0"), {"prompt": "a secret"})
    assert str(refused.value) == "division by zero"
    assert "a secret" not in str(refused.value.__cause__)


async def test_settings_of_the_dsn_win(postgres_dsn: str) -> None:
    database = Database(f"{postgres_dsn}?application_name=mine&connect_timeout=3", "leyden-tests")
    async with database.read() as session:
        assert await session.scalar(text("SHOW application_name")) == "mine"
    await database.close()


async def test_a_lock_whose_server_is_silent_is_lost(dsn: str, proxy: FaultProxy) -> None:
    lock = AdvisoryLock(dsn, "controller", answer_seconds=SILENCE_SECONDS)
    assert await lock.acquire()
    await lock.check()
    proxy.trouble = Trouble(hang=True)
    with pytest.raises(LockLost):
        await lock.check()
    await lock.release()


@pytest.mark.parametrize("may_exist", [False, True])
async def test_calls_are_not_written_to_a_silent_server(behind: Database, proxy: FaultProxy, may_exist: bool) -> None:
    await write_calls(behind, [], may_exist)
    proxy.trouble = Trouble(hang=True)
    for _ in range(2):
        with pytest.raises(StoreAway):
            await write_calls(behind, [], may_exist)
    proxy.heal()
    await write_calls(behind, [], may_exist)
