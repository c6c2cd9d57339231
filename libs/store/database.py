"""Connections to Postgres. A session is a unit of work: leaving its block commits, an exception rolls back.

StoreAway   Postgres cannot be reached, is full or read-only, or did not say whether it committed: repeat the work
Refused     Postgres will never take these rows: a constraint or a missing partition forbids them
  BadValue  a value fits no column: U+0000, half of a surrogate pair, or a number out of range
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import lru_cache, partial
from typing import Any, LiteralString, ParamSpec, TypeVar

import psycopg
from psycopg import AsyncConnection, sql, waiting
from psycopg.abc import PQGen
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import namedtuple_row
from sqlalchemy import exc, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

RV = TypeVar("RV")
P = ParamSpec("P")
Connection = AsyncConnection[tuple[object, ...]]

POOL_SECONDS = 10.0
RECYCLE_SECONDS = 1800
"""Age at which the pool replaces a connection, so that no process stays on an old primary after a failover."""
TRUSTED_SECONDS = 1.0
"""A connection beside the pool that answered so lately is used again without a question whether it lives."""
CONNECT_SECONDS = 5
"""Per address; `?connect_timeout=…` in the DSN overrides it, as any setting of libpq."""
IDLE_TRANSACTION_SECONDS = 300
"""A process that stands still inside a transaction loses it, and with it the locks that others wait for."""

_KEEPALIVES = {
    # The client notices a vanished server within seconds.
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}
_SERVER = {
    "timezone": "UTC",
    # The server ends what a vanished client left running or locked within seconds.
    "client_connection_check_interval": "5s",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
}


class StoreAway(Exception):
    """Postgres cannot be reached, is full or read-only, or did not say whether it committed: repeat the work."""


class Refused(Exception):
    """Postgres will never take these rows, and stored none of their transaction; `__cause__` is the driver's error."""


class BadValue(Refused):
    """A value fits no column: U+0000, half of a surrogate pair, or a number out of range."""


# InternalError: a server that became read-only.
_AWAY = (
    exc.OperationalError, exc.InterfaceError, exc.InternalError, exc.TimeoutError, psycopg.OperationalError,
    psycopg.InterfaceError, psycopg.InternalError, OSError,
)  # fmt: skip
_REFUSED = (exc.IntegrityError, exc.ProgrammingError, psycopg.IntegrityError, psycopg.ProgrammingError)
_BAD_VALUE = (exc.DataError, psycopg.DataError, UnicodeEncodeError)


class ReadSession(AsyncSession):
    """A session in a read-only transaction."""


class Session(ReadSession):
    """A session that may write; functions flush, leaving `Database.session()` commits."""


class Database:
    """The connection pool of one process.

    Args: dsn: `postgresql://…`; client: the name that Postgres shows beside each connection, as `leyden-gateway`;
        pool_size: connections kept; answer_seconds: bound on every statement, after which Postgres counts as away;
        idle_seconds: how long this process may stand still inside a transaction, before Postgres ends it
    """

    def __init__(
        self,
        dsn: str,
        client: str = "leyden",
        *,
        pool_size: int = 5,
        answer_seconds: float = 30.0,
        idle_seconds: float = IDLE_TRANSACTION_SECONDS,
    ) -> None:
        self.dsn, self.idle_seconds = dsn, idle_seconds
        settings = connect_arguments(dsn, client, answer_seconds, idle_seconds)
        arguments = {"answer_seconds": answer_seconds, **settings}
        plain = dsn.replace("postgresql+psycopg://", "postgresql://", 1)
        self._beside = _OwnConnection(partial(connect, plain, autocommit=True, **arguments))
        self.engine = create_async_engine(
            sqlalchemy_url(dsn),
            pool_size=pool_size,
            max_overflow=pool_size,
            pool_pre_ping=True,
            pool_timeout=POOL_SECONDS,
            pool_recycle=RECYCLE_SECONDS,
            # Parameters are prompts and answers, and services log errors.
            hide_parameters=True,
            connect_args={"async_creator_fn": partial(connect, answer_seconds=answer_seconds), **settings},
        )

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """A transaction that commits when the block ends without an exception.

        Raises: StoreAway, Refused: for whatever Postgres or its driver raises in the block, too
        """
        with store_errors():
            async with Session(self.engine, expire_on_commit=False) as session, session.begin():
                yield session

    @asynccontextmanager
    async def read(self) -> AsyncIterator[ReadSession]:
        """A read-only transaction.

        Raises: as `session`
        """
        with store_errors():
            async with ReadSession(self.engine, expire_on_commit=False) as session:
                await session.execute(text("SET TRANSACTION READ ONLY"))
                yield session

    @asynccontextmanager
    async def statements(self) -> AsyncIterator[Connection]:
        """A connection beside the pool, on which each statement is a transaction of its own; one block at a time.

        Why: a session costs four round trips more, for its check of the connection, its begin and its end (bench row
        "answer of 900 tokens with its durable record").

        Raises: as `session`
        """
        with store_errors():
            async with self._beside.block() as connection:
                yield connection

    async def in_thread(self, session: ReadSession, function: Callable[P, RV], *args: P.args, **kwargs: P.kwargs) -> RV:
        """The function's result, computed in a thread while the session's transaction stays open.

        A process that lives sends statements, before Postgres ends the transaction after `idle_seconds` without one.
        """
        computing = asyncio.create_task(asyncio.to_thread(function, *args, **kwargs))
        try:
            while not (await asyncio.wait({computing}, timeout=self.idle_seconds / 4))[0]:
                await session.execute(text("SELECT 1"))
        finally:
            # A thread cannot be stopped: no second one begins beside it.
            await asyncio.wait({computing})
        return computing.result()

    async def ping(self) -> None:
        """Returns when Postgres answers.

        Raises: StoreAway
        """
        with store_errors():
            async with self.engine.connect() as connection:
                await connection.execute(text("SELECT 1"))

    async def close(self) -> None:
        """Closes every connection."""
        await self._beside.close()
        await self.engine.dispose()


@contextmanager
def store_errors() -> Iterator[None]:
    """Gives the errors of Postgres and its driver the names of this module."""
    try:
        yield
    except _AWAY as error:
        raise StoreAway(cause(error)) from error
    except _REFUSED as error:
        raise Refused(cause(error)) from error
    except _BAD_VALUE as error:
        raise BadValue(cause(error)) from error


def cause(error: BaseException) -> str:
    """The message of Postgres or its driver in one line without SQL, for logs and people."""
    message = str(getattr(error, "orig", None) or error) or type(error).__name__
    return message.strip().splitlines()[0]


class BoundedConnection(Connection):
    """A connection on which every wait for the server ends: with the answer, or with the connection.

    psycopg would first cancel the statement politely, which takes another ten seconds where nobody answers. Closing is
    as safe: the server rolls back what was not committed.
    """

    answer_seconds: float = 30.0

    async def wait(self, gen: PQGen[RV], interval: float = 0.1, timeout: float | None = None) -> RV:  # noqa: ASYNC109 - psycopg's own
        """The result of a step of the protocol.

        Raises: psycopg.OperationalError: no answer within `answer_seconds`; the connection is closed
        """
        try:
            async with asyncio.timeout(self.answer_seconds if timeout is None else timeout):
                return await waiting.wait_async(gen, self.pgconn.socket, interval=interval)
        except TimeoutError:
            self.pgconn.finish()
            message = f"Postgres did not answer within {self.answer_seconds:g} s, so the connection was closed"
            raise psycopg.OperationalError(message) from None
        except asyncio.CancelledError:
            self.pgconn.finish()
            raise


class _OwnConnection:
    """A connection that stays open between blocks, of which one runs at a time. Args: connect: opens another one."""

    def __init__(self, connect: Callable[[], Awaitable[BoundedConnection]]) -> None:
        self._connect = connect
        self._turn = asyncio.Lock()
        self._connection: BoundedConnection | None = None
        self._opened_at = self._answered_at = 0.0

    @asynccontextmanager
    async def block(self) -> AsyncIterator[Connection]:
        """Waits for the turn. An exception closes the connection: its server may be away, or a replica by now."""
        async with self._turn:
            connection = await self._living()
            try:
                yield connection
            except BaseException:
                await self.close()
                raise
            self._answered_at = time.monotonic()

    async def close(self) -> None:
        """The next block opens another one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def _living(self) -> BoundedConnection:
        now = time.monotonic()
        if now > self._opened_at + RECYCLE_SECONDS:
            await self.close()
        if self._connection is not None and now > self._answered_at + TRUSTED_SECONDS:
            try:
                await self._connection.execute("")
            except psycopg.OperationalError:
                await self.close()
        if self._connection is None:
            self._connection, self._opened_at = await self._connect(), now
        return self._connection


async def connect(dsn: str = "", *, answer_seconds: float, **arguments: Any) -> BoundedConnection:
    """An open connection; `connect_arguments` are those that every connection of ours has.

    Raises: psycopg.OperationalError: Postgres is away
    """
    try:
        connection = await BoundedConnection.connect(dsn, **arguments)
    except asyncio.CancelledError as error:
        # The frames of psycopg hold the socket for as long as somebody holds the error, and the server waits for it.
        traceback.clear_frames(error.__traceback__)
        raise
    # Later than statement_timeout: a server that lives says itself which statement took too long.
    connection.answer_seconds = answer_seconds + 1.0
    return connection


def connect_arguments(
    dsn: str, client: str, answer_seconds: float, idle_seconds: float = IDLE_TRANSACTION_SECONDS
) -> dict[str, Any]:
    """The settings of libpq beside the DSN; where the DSN names one of them, the DSN wins.

    Args: client: `application_name`
    """
    server = {
        "statement_timeout": f"{round(answer_seconds * 1000)}ms",
        "idle_in_transaction_session_timeout": f"{round(idle_seconds * 1000)}ms",
        **_SERVER,
    }
    ours: dict[str, Any] = {
        "application_name": client,
        "connect_timeout": CONNECT_SECONDS,
        "options": " ".join(f"-c {name}={value}" for name, value in server.items()),
        # After a failover: neither the old primary nor a replica, which would refuse every write.
        "target_session_attrs": "read-write",
        **_KEEPALIVES,
    }
    given = conninfo_to_dict(dsn.replace("postgresql+psycopg://", "postgresql://", 1))
    return {name: value for name, value in ours.items() if name not in given}


def sqlalchemy_url(dsn: str) -> str:
    """`postgresql://…` with the psycopg driver named."""
    scheme, separator, rest = dsn.partition("://")
    if scheme not in {"postgresql", "postgres", "postgresql+psycopg"} or not separator:
        raise ValueError(
            "a DSN must start with postgresql://: set LEYDEN_DATABASE_URL to postgresql://user:password@host/name"
        )
    return f"postgresql+psycopg://{rest}"


async def raw_connection(session: ReadSession) -> Connection:
    """The psycopg connection under a session, inside its transaction: for COPY and the binary format."""
    connection = await (await session.connection()).get_raw_connection()
    driver = connection.driver_connection
    assert isinstance(driver, AsyncConnection)
    return driver


async def binary_rows(session: ReadSession, query: LiteralString, parameters: Mapping[str, object]) -> list[Any]:
    """The rows of a query with psycopg's `%(name)s`, as named tuples.

    Why: Postgres sends text in place of the binary format otherwise, twice the bytes of an array; 640 calls with 4.5 MB
    took 46 ms of CPU, and take 29.
    """
    connection = await raw_connection(session)
    async with connection.cursor(binary=True, row_factory=namedtuple_row) as cursor:
        await cursor.execute(query, parameters)
        return await cursor.fetchall()


async def copy_rows(
    session: Session,
    table: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    types: Sequence[str] | None = None,
    on_conflict_do_nothing: bool = False,
) -> None:
    """Writes rows by COPY inside the session's transaction.

    Args: types: Postgres' name of each column's type; COPY then uses the binary format, which big arrays want;
        on_conflict_do_nothing: rows whose key exists stay as they are (COPY into a temporary table, then INSERT)
    """
    connection = await raw_connection(session)
    if not on_conflict_do_nothing:
        await copy_into(connection, table, columns, rows, types=types)
        return
    names = sql.SQL(", ").join(map(sql.Identifier, columns))
    incoming = f"incoming_{table}"
    placed = {"incoming": sql.Identifier(incoming), "table": sql.Identifier(table), "names": names}
    await connection.execute(
        sql.SQL(
            "CREATE TEMPORARY TABLE IF NOT EXISTS {incoming} ON COMMIT DELETE ROWS"
            " AS SELECT {names} FROM {table} WITH NO DATA"
        ).format(**placed)
    )
    await copy_into(connection, incoming, columns, rows, types=types)
    await connection.execute(
        sql.SQL("INSERT INTO {table} ({names}) SELECT {names} FROM {incoming} ON CONFLICT DO NOTHING").format(**placed)
    )
    await connection.execute(sql.SQL("TRUNCATE {incoming}").format(**placed))


async def copy_into(
    connection: Connection,
    table: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    types: Sequence[str] | None = None,
) -> None:
    """Writes rows by one COPY: all or none. Args: types: as those of `copy_rows`"""
    statement = _copy_statement(table, tuple(columns), is_binary=types is not None)
    async with connection.cursor() as cursor, cursor.copy(statement) as copy:
        if types is not None:
            copy.set_types(types)
        for row in rows:
            await copy.write_row(row)


@lru_cache(maxsize=64)
def _copy_statement(table: str, columns: tuple[str, ...], *, is_binary: bool) -> bytes:
    names = sql.SQL(", ").join(map(sql.Identifier, columns))
    layout = sql.SQL("(FORMAT BINARY)" if is_binary else "")
    return sql.SQL("COPY {} ({}) FROM STDIN {}").format(sql.Identifier(table), names, layout).as_bytes()
