"""Connections: a session is a unit of work; the caller opens it, leaving the block commits, an exception rolls back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from psycopg import AsyncConnection, sql
from sqlalchemy import exc, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from leyden.libs.store.connection import arguments, connect

AWAY = (exc.OperationalError, exc.InterfaceError, exc.InternalError, exc.TimeoutError, OSError)
"""What a session raises while Postgres is away, full, read-only or out of connections: the work may be repeated."""
POOL_SECONDS = 10.0
RECYCLE_SECONDS = 1800
"""Age at which a connection is replaced, so that after a failover or a change of roles nobody keeps an old one."""


class ReadSession(AsyncSession):
    """A session in a read-only transaction."""


class Session(ReadSession):
    """A session that may write; functions flush, leaving `Database.session()` commits."""


class Database:
    """The pool of one process.

    Args: dsn: `postgresql://…`; client: who this is, as `leyden-gateway`: Postgres shows it beside each connection;
        pool_size: connections kept; answer_seconds: bound on every statement, after which Postgres counts as away.
    """

    def __init__(self, dsn: str, client: str = "leyden", *, pool_size: int = 5, answer_seconds: float = 30.0) -> None:
        self.dsn = dsn
        self.engine = create_async_engine(
            sqlalchemy_url(dsn),
            pool_size=pool_size,
            max_overflow=pool_size,
            pool_pre_ping=True,
            pool_timeout=POOL_SECONDS,
            pool_recycle=RECYCLE_SECONDS,
            # Parameters are prompts and answers, and errors are logged.
            hide_parameters=True,
            connect_args={
                "async_creator_fn": partial(connect, answer_seconds=answer_seconds),
                **arguments(dsn, client, answer_seconds),
            },
        )

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """A transaction that commits when the block ends without an exception."""
        async with Session(self.engine, expire_on_commit=False) as session, session.begin():
            yield session

    @asynccontextmanager
    async def read(self) -> AsyncIterator[ReadSession]:
        """A read-only transaction."""
        async with ReadSession(self.engine, expire_on_commit=False) as session:
            await session.execute(text("SET TRANSACTION READ ONLY"))
            yield session

    async def ping(self) -> None:
        """Raises when Postgres cannot answer."""
        async with self.engine.connect() as connection:
            await connection.execute(text("SELECT 1"))

    async def close(self) -> None:
        """Closes every pooled connection."""
        await self.engine.dispose()


def cause(error: BaseException) -> str:
    """What Postgres or its driver said, in one line without SQL: for logs and for people."""
    said = str(getattr(error, "orig", None) or error) or type(error).__name__
    return said.strip().splitlines()[0]


def sqlalchemy_url(dsn: str) -> str:
    """`postgresql://…` with the psycopg driver named."""
    scheme, separator, rest = dsn.partition("://")
    if scheme not in {"postgresql", "postgres", "postgresql+psycopg"} or not separator:
        raise ValueError(
            f"a DSN must start with postgresql://, not {scheme!r}: set LEYDEN_DATABASE_URL to postgresql://user@host/name"
        )
    return f"postgresql+psycopg://{rest}"


async def raw_connection(session: Session) -> AsyncConnection[tuple[object, ...]]:
    """The psycopg connection under a session, inside its transaction: for COPY."""
    connection = await (await session.connection()).get_raw_connection()
    driver = connection.driver_connection
    assert isinstance(driver, AsyncConnection)
    return driver


async def copy_rows(
    session: Session,
    table: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    types: Sequence[str] | None = None,
    on_conflict_do_nothing: bool = False,
) -> None:
    """Writes rows by binary-safe COPY inside the session's transaction.

    Args: types: Postgres' name of each column's type; with them the binary format is used, which big arrays want;
        on_conflict_do_nothing: rows whose key exists are left as they are (COPY into a temporary table, then INSERT).
    """
    connection = await raw_connection(session)
    names = sql.SQL(", ").join(map(sql.Identifier, columns))
    target = sql.Identifier(f"incoming_{table}" if on_conflict_do_nothing else table)
    async with connection.cursor() as cursor:
        if on_conflict_do_nothing:
            await cursor.execute(
                sql.SQL(
                    "CREATE TEMPORARY TABLE IF NOT EXISTS {} ON COMMIT DELETE ROWS AS SELECT {} FROM {} WITH NO DATA"
                ).format(target, names, sql.Identifier(table))
            )
        layout = sql.SQL("(FORMAT BINARY)" if types is not None else "")
        async with cursor.copy(sql.SQL("COPY {} ({}) FROM STDIN {}").format(target, names, layout)) as copy:
            if types is not None:
                copy.set_types(types)
            for row in rows:
                await copy.write_row(row)
        if on_conflict_do_nothing:
            await cursor.execute(
                sql.SQL("INSERT INTO {} ({}) SELECT {} FROM {} ON CONFLICT DO NOTHING").format(
                    sql.Identifier(table), names, names, target
                )
            )
            await cursor.execute(sql.SQL("TRUNCATE {}").format(target))
