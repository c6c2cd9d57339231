"""What every test may ask for: a migrated database of its own and an empty Redis, from servers of this test process."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
import redis
from psycopg import sql

from libs.store.database import Database
from libs.store.embedded import EmbeddedPostgres, EmbeddedRedis
from libs.store.migrate import migrate

_TEMPLATE = "template_leyden"


@dataclass
class PostgresServer:
    """One server per test process; databases are copies of a migrated one."""

    address: str
    numbers: Iterator[int]

    def create(self, template: str = _TEMPLATE) -> str:
        """The DSN of a fresh database."""
        name = f"test_{next(self.numbers)}"
        self._execute("CREATE DATABASE {} TEMPLATE {}", name, template)
        return f"{self.address}/{name}"

    def drop(self, dsn: str) -> None:
        """Removes a database, whoever is still connected."""
        self._execute("DROP DATABASE {} WITH (FORCE)", dsn.rpartition("/")[2])

    def _execute(self, statement: str, *names: str) -> None:
        with psycopg.connect(f"{self.address}/postgres", autocommit=True) as connection:
            connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    server = EmbeddedPostgres(tmp_path_factory.mktemp("postgres"), durable=False)
    address = server.start().rpartition("/")[0]
    try:
        running = PostgresServer(address, itertools.count(1))
        running._execute("CREATE DATABASE {}", _TEMPLATE)
        migrate(f"{address}/{_TEMPLATE}")
        yield running
    finally:
        server.stop()


@pytest.fixture
def empty_postgres_dsn(postgres_server: PostgresServer) -> Iterator[str]:
    """A database without any table, for tests of migrations."""
    dsn = postgres_server.create("template0")
    yield dsn
    postgres_server.drop(dsn)


@pytest.fixture
def postgres_dsn(postgres_server: PostgresServer) -> Iterator[str]:
    """A migrated database of this test's own."""
    dsn = postgres_server.create()
    yield dsn
    postgres_server.drop(dsn)


@pytest.fixture
async def database(postgres_dsn: str) -> AsyncIterator[Database]:
    """Sessions on `postgres_dsn`."""
    opened = Database(postgres_dsn)
    yield opened
    await opened.close()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedRedis(Path(tmp_path_factory.mktemp("redis")))
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture
def redis_url(redis_server: str) -> str:
    """An empty Redis."""
    with redis.Redis.from_url(redis_server) as client:
        client.flushall()
    return redis_server
