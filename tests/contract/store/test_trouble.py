"""Sessions, locks and the call writer while Postgres is silent, read-only or cut off: a named error, never a wait."""

from __future__ import annotations

import asyncio
import select
from collections.abc import AsyncIterator, Callable, Iterator

import psutil
import psycopg
import pytest
from sqlalchemy import exc, text

from leyden.libs.store.calls import CallWriter, QuickReader, StoreAway
from leyden.libs.store.connection import BoundedConnection, connect
from leyden.libs.store.database import AWAY, Database, cause
from leyden.libs.store.locks import AdvisoryLock, LockLost
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


async def test_a_silent_server_is_away_and_the_next_session_finds_the_healed_one(
    behind: Database, proxy: FaultProxy
) -> None:
    with pytest.raises(exc.OperationalError) as away:
        await say(behind, lambda: setattr(proxy, "trouble", Trouble(hang=True)))
    assert cause(away.value) == "Postgres did not answer within 2.5 s, so the connection was closed"
    proxy.heal()
    await behind.ping()


async def test_a_wait_that_is_given_up_ends_at_once_and_costs_only_its_connection(
    behind: Database, proxy: FaultProxy
) -> None:
    await behind.ping()
    proxy.trouble = Trouble(hang=True)
    async with asyncio.timeout(5):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await behind.ping()
    proxy.heal()
    await behind.ping()


async def test_connections_that_were_cut_are_replaced(behind: Database, proxy: FaultProxy) -> None:
    with pytest.raises(AWAY):
        await say(behind, proxy.cut)
    await behind.ping()


async def test_a_commit_whose_answer_was_lost_is_no_success(
    behind: Database, proxy: FaultProxy, postgres_dsn: str
) -> None:
    async with behind.session() as session:
        await session.execute(text("CREATE TABLE noted (number integer PRIMARY KEY)"))
    proxy.trouble = Trouble(cut_at=b"COMMIT", cut_answer=True)
    with pytest.raises(AWAY):
        async with behind.session() as session:
            await session.execute(text("INSERT INTO noted VALUES (1)"))
    proxy.heal()
    with pytest.raises(exc.IntegrityError):
        async with behind.session() as session:
            await session.execute(text("INSERT INTO noted VALUES (1)"))


async def test_a_server_that_became_read_only_is_away(behind: Database, postgres_dsn: str) -> None:
    name = postgres_dsn.rpartition("/")[2]
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on".encode())
    with pytest.raises(exc.OperationalError) as away:
        await behind.ping()
    assert "session is read-only" in str(away.value)


async def test_postgres_shows_who_is_connected_and_errors_never_show_parameters(behind: Database) -> None:
    async with behind.read() as session:
        assert await session.scalar(text("SHOW application_name")) == "leyden-tests"
    with pytest.raises(exc.DataError) as refused:
        async with behind.read() as session:
            await session.execute(text("SELECT CAST(:prompt AS text), 1/0"), {"prompt": "a secret"})
    assert "a secret" not in str(refused.value)
    assert cause(refused.value) == "division by zero"


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
async def test_calls_are_not_written_to_a_silent_server(dsn: str, proxy: FaultProxy, may_exist: bool) -> None:
    writer = CallWriter(dsn, timeout_seconds=SILENCE_SECONDS)
    await writer.write([], may_exist=may_exist)
    proxy.trouble = Trouble(hang=True)
    with pytest.raises(StoreAway):
        await writer.write([], may_exist=may_exist)
    with pytest.raises(StoreAway):
        await writer.write([], may_exist=may_exist)
    proxy.heal()
    await writer.write([], may_exist=may_exist)
    await writer.close()


@pytest.fixture
async def listening(dsn: str) -> AsyncIterator[BoundedConnection]:
    """A connection that stays registered with the loop."""
    connection = await connect(dsn, answer_seconds=30.0, autocommit=True)
    connection.listen()
    yield connection
    await connection.close()


async def test_an_answer_is_heard_after_the_server_has_spoken_unasked_and_to_more_than_the_socket_takes(
    listening: BoundedConnection, postgres_dsn: str
) -> None:
    await listening.execute("LISTEN news")
    with psycopg.connect(postgres_dsn, autocommit=True) as other:
        other.execute("NOTIFY news")
        # It has arrived and been looked at in many turns of the loop.
        await asyncio.to_thread(select.select, [listening.pgconn.socket], [], [])
        for _ in range(20):
            await asyncio.sleep(0)
    for size in (1, 8_000_000, 2):
        answer = await (await listening.execute("SELECT length(%s), repeat('x', %s)", ["x" * size, size])).fetchone()
        assert answer == (size, "x" * size)


async def test_a_connection_that_listens_leaves_nothing_open(postgres_dsn: str) -> None:
    before = psutil.Process().num_fds()
    for _ in range(3):
        connection = await connect(postgres_dsn, answer_seconds=30.0)
        connection.listen()
        await connection.execute("SELECT 1")
        await connection.close()
        await connection.close()
    assert psutil.Process().num_fds() == before


async def test_a_connection_that_listens_is_closed_when_its_wait_is_given_up(
    listening: BoundedConnection, proxy: FaultProxy
) -> None:
    proxy.trouble = Trouble(hang=True)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await listening.execute("SELECT 1")
    assert listening.closed


async def test_those_who_wait_for_each_other_before_a_silent_server_wait_no_longer_than_one(
    dsn: str, proxy: FaultProxy
) -> None:
    reader = QuickReader(dsn, timeout_seconds=SILENCE_SECONDS)
    assert await reader.serving() == []
    proxy.trouble = Trouble(hang=True)
    # In turns they would take two minutes.
    async with asyncio.timeout(60):
        answers = await asyncio.gather(
            *(reader.completed("run-a", "run-a.0.0", 1) for _ in range(80)), return_exceptions=True
        )
    assert {type(answer) for answer in answers} == {StoreAway}
    proxy.heal()
    assert await reader.completed("run-a", "run-a.0.0", 1) == 0
    await reader.close()


async def test_engines_are_not_read_from_a_silent_server(dsn: str, proxy: FaultProxy) -> None:
    reader = QuickReader(dsn, timeout_seconds=SILENCE_SECONDS)
    assert await reader.serving() == []
    proxy.trouble = Trouble(hang=True)
    with pytest.raises(StoreAway):
        await reader.serving()
    proxy.heal()
    assert await reader.serving() == []
    await reader.close()
