"""Fixtures of all tests: a migrated database for each test and an empty Redis, from servers of this test process."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import itertools
import os
import shutil
import ssl
import tempfile
from collections.abc import AsyncIterator, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, LiteralString

import certifi
import httpcore2
import httpx
import psycopg
import pytest
import redis
from hypothesis import HealthCheck, settings
from psycopg import sql
from xdist.scheduler import LoadFileScheduling

from leyden.libs.embedded.servers import EmbeddedPostgres, EmbeddedRedis
from leyden.libs.store.database import Database
from leyden.libs.store.migrate import migrate
from tests.support.accepting import close_late_connections

_TEMPLATE = "template_leyden"
GC_THRESHOLD = 50_000
"""New objects between two collections of the youngest generation, as in services; Python's 700 cost 13 % of a test."""


def _one_authority() -> str:
    """A file with one certificate. Tests speak to loopback, and each client would read all authorities for 70 ms."""
    end = "-----END CERTIFICATE-----\n"
    first = Path(certifi.where()).read_text().partition(end)[0]
    file = Path(tempfile.mkstemp(prefix="leyden-authority-", suffix=".pem")[1])
    atexit.register(file.unlink)
    file.write_text(first + end)
    return str(file)


# httpx asks for the file with every client that it makes, and httpx2 for a context.
certifi.where = partial(str, _one_authority())
httpcore2.default_ssl_context = lambda **_: ssl.create_default_context(cafile=certifi.where())

close_late_connections()

# The same examples every time, and no clock: a failure is a failure of the code. `make fuzz` looks further.
_NO_CLOCK: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", max_examples=50, derandomize=True, database=None, **_NO_CLOCK)
settings.register_profile("fuzz", print_blob=True, max_examples=1000, **_NO_CLOCK)
settings.load_profile("same")

# One worker runs them, one after another, on the platform that it starts once.
_ON_ONE_PLATFORM = (
    "e2e/test_console.py",
    "e2e/test_first_light.py",
    "e2e/promises/test_06_one_writer_per_table.py",
    "e2e/test_one_rollout.py",
    "e2e/promises/test_10_an_agent_reaches_its_own_rollout_and_nothing_else.py",
    "e2e/test_several_agents.py",
)
# The files that take longest begin first, so that no worker is left with one at the end.
_LONGEST = (
    *_ON_ONE_PLATFORM,
    "e2e/promises/test_07_kill_any_process_at_any_moment.py",
    "e2e/test_points.py",
    "e2e/test_policies.py",
    "e2e/test_warm_start.py",
    "e2e/promises/test_08_infrastructure_failures_are_never_rewards.py",
    "e2e/promises/test_01_no_answer_without_a_record.py",
    "e2e/promises/test_09_weights_change_and_the_agent_never_notices.py",
    "e2e/promises/test_03_every_token_knows_its_policy_version.py",
    "e2e/test_dashboards.py",
    "e2e",
    "contract/trainer",
    "unit/trainer/test_ranks.py",
    "unit/trainer/test_sharded_state.py",
    "unit/gateway/prompt/test_prefix.py",
    "contract/engine",
    "contract/state_machines",
    "contract",
)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collects without the garbage collector, which then never visits the modules and tests again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts by _LONGEST; the rest stays in its order."""
    root = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        name = f"{item.path.relative_to(root)}"
        return next((place for place, start in enumerate(_LONGEST) if name.startswith(start)), len(_LONGEST))

    items.sort(key=place)


class _Scheduling(LoadFileScheduling):
    """Gives each worker whole files, and one of them all the files of `_ON_ONE_PLATFORM`."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return _ON_ONE_PLATFORM[0] if file.endswith(_ON_ONE_PLATFORM) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Replaces the scheduling of `--dist loadfile`."""
    return _Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


@dataclass
class PostgresServer:
    """One server per test process; databases are copies of a migrated one.

    Its connection stays open: another for each statement took as long as half of the statement.
    """

    address: str
    connection: psycopg.Connection
    numbers: Iterator[int]

    def create(self, template: str = _TEMPLATE) -> str:
        """The DSN of a fresh database."""
        name = f"test_{next(self.numbers)}"
        self.execute("CREATE DATABASE {} TEMPLATE {} STRATEGY FILE_COPY", name, template)
        return f"{self.address}/{name}"

    def drop(self, dsn: str) -> None:
        """Removes a database, whoever is still connected."""
        self.execute("DROP DATABASE {} WITH (FORCE)", dsn.rpartition("/")[2])

    def execute(self, statement: LiteralString, *names: str) -> None:
        """Runs a statement with these identifiers in its braces."""
        self.connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))


@pytest.fixture(scope="session")
def server_folder() -> Iterator[Path]:
    """Folder of this process's servers; in memory, if there is room, a new database takes 12 ms instead of 300."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 2 * 2**30
    base = memory if roomy else Path(tempfile.gettempdir())
    for left in base.glob("leyden-tests-*"):
        _remove_if_abandoned(left)
    # It has its name, by which others look for abandoned ones, only while it is locked.
    new = Path(tempfile.mkdtemp(prefix="new-leyden-tests-", dir=base))
    with (new / "held").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        folder = new.rename(base / new.name.removeprefix("new-"))
        yield folder
        shutil.rmtree(folder)


def _remove_if_abandoned(folder: Path) -> None:
    """Ends what a test process that was killed left behind; a living one holds its lock."""
    with contextlib.suppress(OSError), (folder / "held").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        EmbeddedPostgres(folder / "postgres").stop()
        EmbeddedRedis(folder / "redis").stop()
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def postgres_server(server_folder: Path) -> Iterator[PostgresServer]:
    server = EmbeddedPostgres(server_folder / "postgres", durable=False)
    address = server.start().rpartition("/")[0]
    try:
        with psycopg.connect(f"{address}/postgres", autocommit=True) as connection:
            _hash_quickly(connection)
            running = PostgresServer(address, connection, itertools.count(1))
            running.execute("CREATE DATABASE {}", _TEMPLATE)
            migrate(f"{address}/{_TEMPLATE}")
            yield running
    finally:
        server.stop()


def _hash_quickly(connection: psycopg.Connection) -> None:
    """Keeps the password and hashes it once instead of 4,096 times, which each connection would repeat for 3 ms."""
    connection.execute("SET scram_iterations = 1")
    password = sql.Literal(connection.info.password)
    connection.execute(sql.SQL("ALTER ROLE CURRENT_USER PASSWORD {}").format(password))


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
def redis_server(server_folder: Path) -> Iterator[str]:
    server = EmbeddedRedis(server_folder / "redis")
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


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama of about 100,000 parameters, its byte-level tokenizer and its ChatML template."""
    from tests.support.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of a mixture of experts."""
    from tests.support.tiny_model import make_tiny_experts

    return make_tiny_experts(tmp_path_factory.mktemp("models") / "experts")


@pytest.fixture
async def api_http(postgres_dsn: str) -> AsyncIterator[httpx.AsyncClient]:
    """The REST API in this process, signed in as its first administrator.

    Uploads are bounded at 4 KiB, and runners execute processes.
    """
    from leyden.services.api.app import create_app
    from leyden.services.api.settings import Settings

    bounds = {"max_upload_bytes": 4096, "runner_types": frozenset({"process"})}
    app = create_app(Settings(database_url=postgres_dsn, admin_token="secret-of-tests", **bounds))
    headers = {"authorization": "Bearer secret-of-tests"}
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://api", headers=headers) as client:
            yield client


@pytest.fixture
def api_url(postgres_dsn: str) -> Iterator[str]:
    """The REST API on a loopback port, in a thread of its own; its admin token is `secret-of-tests`."""
    from tests.fakes.served_api import served_api

    with served_api(postgres_dsn) as url:
        yield url


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """An empty bucket of a server of S3, and its variables in the environment, LEYDEN_WEIGHT_STORE too."""
    from tests.support.object_store import served_bucket

    with served_bucket() as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield variables
