from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from leyden.libs.embedded import servers
from leyden.libs.embedded.servers import EmbeddedError, EmbeddedPostgres, EmbeddedRedis

ROOT = Path(__file__).parents[3]


def pid_of(path: Path) -> int:
    return int(path.read_text().split("\n", 1)[0])


def wait_until_dead(pid: int) -> None:
    deadline = time.monotonic() + 60
    while servers._lives(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def folder(server_folder: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=server_folder))


@pytest.fixture
def postgres(folder: Path) -> Iterator[EmbeddedPostgres]:
    server = EmbeddedPostgres(folder / "postgres", durable=False)
    yield server
    server.stop()


@pytest.fixture
def cache(folder: Path) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(folder / "redis")
    yield server
    server.stop()


def test_a_server_killed_right_after_its_start_is_an_error_of_ours(
    postgres: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = servers._create_database

    def killed_first(dsn: str, name: str) -> None:
        pid = pid_of(postgres.data / "postmaster.pid")
        os.kill(pid, signal.SIGKILL)
        wait_until_dead(pid)
        create(dsn, name)

    monkeypatch.setattr(servers, "_create_database", killed_first)
    with pytest.raises(EmbeddedError, match="ended right after its start"):
        postgres.start()
    monkeypatch.undo()
    with psycopg.connect(postgres.start()) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_second_start_finds_the_running_server(postgres: EmbeddedPostgres, cache: EmbeddedRedis) -> None:
    dsn, url = postgres.start(), cache.start()
    pids = pid_of(postgres.data / "postmaster.pid"), pid_of(cache.folder / "redis.pid")
    assert EmbeddedPostgres(postgres.folder).start() == dsn
    assert EmbeddedRedis(cache.folder).start() == url
    assert (pid_of(postgres.data / "postmaster.pid"), pid_of(cache.folder / "redis.pid")) == pids


def test_what_was_committed_survives_a_restart_and_a_kill(postgres: EmbeddedPostgres) -> None:
    with psycopg.connect(postgres.start()) as connection:
        connection.execute("CREATE TABLE kept (n int)")
        connection.execute("INSERT INTO kept VALUES (1)")
    postgres.stop()
    postgres.start()
    pid = pid_of(postgres.data / "postmaster.pid")
    os.kill(pid, signal.SIGKILL)
    wait_until_dead(pid)
    with psycopg.connect(postgres.start()) as connection:
        assert connection.execute("SELECT n FROM kept").fetchall() == [(1,)]


def test_a_server_killed_under_a_busy_query_starts_again_once_its_children_ended(postgres: EmbeddedPostgres) -> None:
    dsn = postgres.start()
    pid = pid_of(postgres.data / "postmaster.pid")
    code = "import psycopg, sys; psycopg.connect(sys.argv[1]).execute(sys.argv[2])"
    query = "SELECT sum(sqrt(n)) FROM generate_series(1, 10000000) n"
    with subprocess.Popen([sys.executable, "-c", code, dsn, query], stderr=subprocess.DEVNULL):
        with psycopg.connect(dsn, autocommit=True) as connection:
            busy = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%%sqrt%%' AND pid <> pg_backend_pid()"
            while connection.execute(busy).fetchone() == (0,):
                time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        wait_until_dead(pid)
        with psycopg.connect(postgres.start()) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)


def test_servers_outlive_a_starter_that_was_killed(folder: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path;"
        "from leyden.libs.embedded.servers import EmbeddedPostgres, EmbeddedRedis;"
        "folder = Path(sys.argv[1]);"
        "print(EmbeddedPostgres(folder / 'p', durable=False).start(), EmbeddedRedis(folder / 'r').start(), flush=True);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(folder)], cwd=ROOT, capture_output=True, timeout=120)
    postgres, cache = EmbeddedPostgres(folder / "p"), EmbeddedRedis(folder / "r")
    try:
        assert ended.returncode == -signal.SIGKILL
        assert f"{postgres.start()} {cache.start()}\n" == ended.stdout.decode()
    finally:
        postgres.stop()
        cache.stop()


def test_an_interrupt_of_the_terminal_does_not_reach_the_servers(
    postgres: EmbeddedPostgres, cache: EmbeddedRedis
) -> None:
    postgres.start()
    cache.start()
    sessions = {os.getsid(pid_of(postgres.data / "postmaster.pid")), os.getsid(pid_of(cache.folder / "redis.pid"))}
    assert os.getsid(0) not in sessions


def test_a_pid_file_that_names_another_process_is_recovered_from(
    postgres: EmbeddedPostgres, cache: EmbeddedRedis
) -> None:
    postgres.start()
    cache.start()
    stale = (postgres.data / "postmaster.pid").read_text().split("\n", 1)[1]
    postgres.stop()
    cache.stop()
    (postgres.data / "postmaster.pid").write_text(f"{os.getpid()}\n{stale}")
    (cache.folder / "redis.pid").write_text(f"{os.getpid()}\n")
    with psycopg.connect(postgres.start()) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
    with redis.Redis.from_url(cache.start()) as client:
        assert client.ping() is True


def test_the_server_of_another_folder_is_not_stopped(folder: Path, cache: EmbeddedRedis) -> None:
    """After a restart of the machine it may have the pid of this folder's server."""
    cache.start()
    cache.stop()
    other = EmbeddedRedis(folder / "other")
    url = other.start()
    try:
        (cache.folder / "redis.pid").write_bytes((other.folder / "redis.pid").read_bytes())
        cache.stop()
        with redis.Redis.from_url(url) as client:
            assert client.ping() is True
    finally:
        other.stop()


def test_an_interrupted_initialisation_is_repeated(postgres: EmbeddedPostgres) -> None:
    (postgres.folder / "data.new" / "base").mkdir(parents=True)
    with psycopg.connect(postgres.start()) as connection:
        assert connection.execute("SELECT current_database()").fetchone() == ("leyden",)


def test_an_occupied_port_is_replaced(postgres: EmbeddedPostgres, cache: EmbeddedRedis) -> None:
    ports = [int(address.rpartition(":")[2].split("/")[0]) for address in (postgres.start(), cache.start())]
    postgres.stop()
    cache.stop()
    listeners = [socket.create_server(("127.0.0.1", port)) for port in ports]
    try:
        with psycopg.connect(postgres.start()) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)
        with redis.Redis.from_url(cache.start()) as client:
            assert client.ping() is True
    finally:
        for listener in listeners:
            listener.close()


def test_the_password_is_needed(postgres: EmbeddedPostgres, cache: EmbeddedRedis) -> None:
    dsn, url = postgres.start(), cache.start()
    password = dsn.split(":")[2].split("@")[0]
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(dsn.replace(password, "guess"))
    once = Retry(NoBackoff(), 0)
    with (
        redis.Redis.from_url(f"redis://{url.rpartition('@')[2]}", retry=once) as stranger,
        pytest.raises(redis.AuthenticationError),
    ):
        stranger.ping()


def test_passwords_are_readable_only_by_their_owner(postgres: EmbeddedPostgres, cache: EmbeddedRedis) -> None:
    postgres.start()
    cache.start()
    private = [postgres.folder / "postgres.json", cache.folder / "redis.json", cache.folder / "redis.conf"]
    assert [path.stat().st_mode & 0o777 for path in private] == [0o600] * 3
    assert not (postgres.folder / "password.new").exists()


def test_stopping_what_does_not_run_changes_nothing(postgres: EmbeddedPostgres, cache: EmbeddedRedis) -> None:
    postgres.stop()
    cache.stop()


def test_a_broken_data_folder_is_reported_with_the_log_and_the_remedy(postgres: EmbeddedPostgres) -> None:
    postgres.start()
    postgres.stop()
    (postgres.data / "global" / "pg_control").unlink()
    with pytest.raises(EmbeddedError, match=r"(?s)pg_control.*LEYDEN_DATABASE_URL"):
        postgres.start()


def test_a_folder_closed_to_others_works_for_root_too(folder: Path) -> None:
    closed = folder / "closed"
    closed.mkdir(mode=0o700)
    server = EmbeddedPostgres(closed / "a folder", durable=False)
    try:
        with psycopg.connect(server.start()) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)
        assert closed.stat().st_mode & 0o777 == 0o700
    finally:
        server.stop()
