"""A password with the characters of URLs opens Postgres and Redis, and no output of any process shows a piece of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from urllib.parse import urlsplit

import psycopg
import pytest
import redis
from psycopg import sql

from leyden.libs.queue.connection import connect as connect_redis
from leyden.libs.service import ServiceSettings
from leyden.libs.store.database import Database
from leyden.libs.store.locks import AdvisoryLock
from leyden.libs.store.settings import StoreSettings

PASSWORD = "p@ss/w:rd%2#x"
PIECES = (PASSWORD, "w:rd", "%2#x", "ss/w", "2#x")
USER = "app@team/1"
PROCESSES = (
    ("leyden.libs.store.wait", "server", "--seconds", "3"),
    ("leyden.libs.store.migrate",),
    ("leyden.services.api",),
    ("leyden.services.credit",),
    ("leyden.services.collector",),
)
GLUED = [
    ("LEYDEN_DATABASE_URL", f"postgresql://leyden:{PASSWORD}@127.0.0.1:1/leyden"),
    ("LEYDEN_DATABASE_URL", "postgresql://leyden:p@ss/w:rd@127.0.0.1:1/leyden"),
    ("LEYDEN_DATABASE_URL", "postgresql://leyden:ss/w@127.0.0.1:1/leyden"),
    ("LEYDEN_DATABASE_URL", "postgresql://leyden:2#x@127.0.0.1:1/leyden"),
    ("LEYDEN_DATABASE_URL", PASSWORD),
    ("LEYDEN_REDIS_URL", f"redis://:{PASSWORD}@127.0.0.1:1/0"),
]


@pytest.fixture
def postgres(postgres_dsn: str) -> Iterator[dict[str, str]]:
    """The parts of a database whose owner has such a name and such a password."""
    found = urlsplit(postgres_dsn)
    name, user = found.path[1:], sql.Identifier(USER)
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE ROLE {} SUPERUSER LOGIN PASSWORD {}").format(user, PASSWORD))
        yield {
            "LEYDEN_DATABASE_HOST": str(found.hostname),
            "LEYDEN_DATABASE_PORT": str(found.port),
            "LEYDEN_DATABASE_USER": USER,
            "LEYDEN_DATABASE_PASSWORD": PASSWORD,
            "LEYDEN_DATABASE_NAME": name,
            "LEYDEN_DATABASE_PARAMETERS": "sslmode=disable",
        }
        connection.execute(sql.SQL("DROP ROLE {}").format(user))


@pytest.fixture
def redis_parts(redis_url: str) -> Iterator[dict[str, str]]:
    """The parts of a Redis that takes such a password."""
    found = urlsplit(redis_url)
    with redis.Redis.from_url(redis_url) as client:
        client.execute_command("ACL", "SETUSER", "default", f">{PASSWORD}")
        yield {
            "LEYDEN_REDIS_HOST": str(found.hostname),
            "LEYDEN_REDIS_PORT": str(found.port),
            "LEYDEN_REDIS_PASSWORD": PASSWORD,
        }
        client.execute_command("ACL", "SETUSER", "default", f"<{PASSWORD}")


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process of the platform that sees these variables alone of ours."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LEYDEN_")}
    return subprocess.run(
        [sys.executable, "-m", *command],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def shown(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [piece for piece in PIECES if piece in done.stdout + done.stderr]


async def test_parts_open_both_stores(
    postgres: dict[str, str], redis_parts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (postgres | redis_parts).items():
        monkeypatch.setenv(name, value)
    settings = ServiceSettings()
    database = Database(settings.database_url)
    await database.ping()
    await database.close()
    lock = AdvisoryLock(StoreSettings().database_url, "trial")
    assert await lock.acquire()
    await lock.release()
    async with connect_redis(settings.redis_url) as client:
        assert await client.ping()
    assert all(piece not in repr(settings) for piece in PIECES)


def test_the_commands_of_the_chart_take_parts_and_show_none(postgres: dict[str, str]) -> None:
    for command in (PROCESSES[0], PROCESSES[1]):
        done = run(*command, **postgres)
        assert (done.returncode, shown(done)) == (0, []), done.stderr


def test_a_refused_password_is_shown_by_nobody(postgres: dict[str, str]) -> None:
    done = run(*PROCESSES[0], **postgres | {"LEYDEN_DATABASE_PASSWORD": f"{PASSWORD}2"})
    assert done.returncode == 1
    assert "password authentication failed" in done.stderr
    assert shown(done) == []


@pytest.mark.parametrize("process", PROCESSES, ids=lambda process: str(process[0]))
@pytest.mark.parametrize(("name", "address"), GLUED, ids=range(len(GLUED)))
def test_a_url_with_an_unescaped_password_is_one_line_that_shows_nothing(
    process: tuple[str, ...], name: str, address: str
) -> None:
    if name == "LEYDEN_REDIS_URL" and "store" in process[0]:
        return
    done = run(*process, **{name: address})
    assert done.returncode == 1
    assert done.stderr.startswith(f"{name}: should be an address such as")
    assert shown(done) == []


@pytest.mark.parametrize("host", ["db.example", "10.0.0.1", "2001:db8::1"])
def test_any_host_makes_an_address(host: str) -> None:
    settings = ServiceSettings(database_host=host, redis_host=host, redis_number=3)
    written = f"[{host}]" if ":" in host else host
    assert settings.database_url == f"postgresql://leyden@{written}:5432/leyden"
    assert settings.redis_url == f"redis://{written}:6379/3"


def test_a_url_that_is_set_wins_over_parts() -> None:
    settings = ServiceSettings(database_host="one", database_url="postgresql://other/x")
    assert settings.database_url == "postgresql://other/x"
