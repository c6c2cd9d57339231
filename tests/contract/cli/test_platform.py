"""The supervisor with real processes: it keeps services running, ends them all, and recovers from its own death."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from leyden.libs.cli.local.platform import AlreadyRunning, Options, Platform, PlatformError
from leyden.libs.cli.local.record import PlatformRecord, read_record, started_ticks
from leyden.libs.client import Client
from leyden.libs.embedded.servers import EmbeddedPostgres, EmbeddedRedis
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[3]
# A supervisor to be killed, as a program of its own.
PROGRAM = """
import sys
from pathlib import Path
from leyden.libs.cli.local.platform import Options, Platform

platform = Platform(Path(sys.argv[1]), Options(free_ports=True, services=("api",), model_path=Path(sys.argv[1])))
platform.start()
platform.ready(120)
print("ready", flush=True)
platform.wait()
"""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "home"
    yield folder
    if folder.exists():
        EmbeddedRedis(folder / "redis").stop()
        EmbeddedPostgres(folder / "postgres").stop()


def small(home: Path, **changes: object) -> Platform:
    options = {"free_ports": True, "services": ("api", "collector"), "model_path": home} | changes
    return Platform(home, Options(**options))  # type: ignore[arg-type]  # a test's shorthand


def recorded(home: Path) -> PlatformRecord:
    record = read_record(home)
    assert record is not None
    return record


def test_a_platform_restarts_dead_services_refuses_a_second_platform_and_stops_cleanly(home: Path) -> None:
    platform = small(home)
    platform.start()
    try:
        record = platform.ready(120)
        pids = platform.pids()
        assert set(pids) == {"api", "collector"}
        with Client(platform.facts.url("api"), platform.token, patience_seconds=60) as client:
            assert client.health().database == "ok"
            with pytest.raises(AlreadyRunning, match="leyden status"):
                small(home).start()
            os.kill(pids["api"], signal.SIGKILL)
            until(lambda: platform.pids().get("api", pids["api"]) != pids["api"])
            # The same address: the client only waits.
            assert client.health().database == "ok"
        assert recorded(home).services["api"].restarts == 1
        for secret in (home / "platform.json", *(home / "secrets").iterdir()):
            assert secret.stat().st_mode & 0o077 == 0, secret
    finally:
        platform.stop()
    left = [platform.record().services[name].process for name in pids]
    assert not any(process is not None and process.is_alive() for process in left)
    assert recorded(home).state == "stopped"
    assert record.database_url.startswith("postgresql://")
    assert EmbeddedPostgres(home / "postgres")._pid() is None


def start_and_kill(home: Path) -> PlatformRecord:
    """A platform whose supervisor got SIGKILL once it was ready."""
    supervisor = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(home)], stdout=subprocess.PIPE, cwd=ROOT, start_new_session=True
    )
    try:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == b"ready\n"
        return recorded(home)
    finally:
        supervisor.kill()
        supervisor.communicate()


def test_services_die_with_a_killed_supervisor_and_the_next_start_recovers(home: Path) -> None:
    before = start_and_kill(home)
    service = before.services["api"].process
    assert service is not None
    until(lambda: not service.is_alive())
    platform = small(home, services=("api",))
    platform.start()
    try:
        after = platform.ready(120)
        # The database and the address are those of before.
        assert (after.database_url, after.url) == (before.database_url, before.url)
    finally:
        platform.stop()


def test_a_start_with_a_server_of_ones_own_stops_the_one_that_a_killed_supervisor_left(home: Path) -> None:
    start_and_kill(home)
    own = EmbeddedRedis(home.parent / "own")
    try:
        platform = small(home, services=("api",), redis_url=own.start())
        platform.start()
        platform.stop()
        assert EmbeddedRedis(home / "redis")._pid() is None
    finally:
        own.stop()


def test_down_stops_processes_left_by_a_killed_supervisor(home: Path) -> None:
    start_and_kill(home)
    command = [sys.executable, "-m", "leyden.libs.cli", "down", "--home", str(home), "--json"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120, check=True)
    assert json.loads(result.stdout) == {"stopped": True}
    assert (EmbeddedPostgres(home / "postgres")._pid(), EmbeddedRedis(home / "redis")._pid()) == (None, None)


def test_other_commands_detect_a_running_and_a_stopped_platform(home: Path) -> None:
    def leyden(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "leyden.libs.cli", *words, "--home", str(home)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)

    platform = small(home, services=("api",))
    platform.start()
    try:
        platform.ready(120)
        shown = leyden("status", "--json")
        assert (shown.returncode, json.loads(shown.stdout)["services"]["api"]["status"]) == (0, "ok")
        again = leyden("up", "--detach")
        assert (again.returncode, "already runs" in again.stderr) == (5, True)
    finally:
        platform.stop()
    gone = leyden("status")
    assert (gone.returncode, "leyden up" in gone.stderr) == (4, True)


@pytest.mark.parametrize("options", [(), ("--detach",)])
def test_a_home_is_open_to_its_owner_alone(tmp_path: Path, options: tuple[str, ...]) -> None:
    home = tmp_path / "home"
    nowhere = {"LEYDEN_DATABASE_URL": "postgresql://nobody@127.0.0.1:1/nothing", "LEYDEN_MODEL_PATH": str(tmp_path)}
    command = [sys.executable, "-m", "leyden.libs.cli", "up", "--free-ports", "--home", str(home), *options]
    with_groups = {"umask": 0o002, "env": os.environ | nowhere, "timeout": 120, "check": False}
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, **with_groups)  # type: ignore[call-overload]
    assert (ended.returncode, stat.S_IMODE(home.stat().st_mode)) == (1, 0o700)


def test_a_failed_start_reports_the_reason_and_stops_cleanly(home: Path) -> None:
    platform = small(home, database_url="postgresql://nobody@127.0.0.1:1/nothing")
    log = home / "logs" / "migrate.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("the failure of an earlier start\n")
    platform.start()
    try:
        with pytest.raises(PlatformError, match="migrate") as refused:
            platform.ready(120)
        assert "an earlier start" not in str(refused.value)
    finally:
        platform.stop()
    assert platform.pids() == {}


def test_a_start_can_be_stopped_at_once(home: Path) -> None:
    platform = small(home)
    platform.start()
    platform.stop()
    assert platform.pids() == {}
    assert recorded(home).state == "stopped"


def test_a_later_process_with_the_same_pid_is_another_one() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ticks = started_ticks(child.pid)
    assert ticks
    child.communicate(b"\n")
    assert started_ticks(child.pid) != ticks
