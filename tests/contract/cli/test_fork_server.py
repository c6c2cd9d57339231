"""Services as forks of one process: each is a process of its own, and the death of any part ends no other's work."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from leyden.libs.cli.local import fork_server
from leyden.libs.cli.local.fork_server import ForkedProcess, ForkServer
from leyden.libs.cli.local.platform import Options, Platform
from tests.contract.cli.test_crashes import health
from tests.support.waiting import until

SERVICES = ("api", "collector", "credit")
# A program that prints all that a fork begins with, then waits for a signal or ends with the status of its variables.
PROGRAM = """
import asyncio, gc, json, os, random, signal, socket, sys, threading
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import REGISTRY

gc.unfreeze()
live = (asyncio.AbstractEventLoop, socket.socket, threading.Thread, TracerProvider)
objects = [one for one in gc.get_objects() if issubclass(type(one), live)]
print(json.dumps({
    "variables": dict(os.environ),
    "descriptors": {name: os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")
                    if os.path.exists(f"/proc/self/fd/{name}")},
    "live": [type(one).__name__ for one in objects if not isinstance(one, socket.socket) or one.fileno() >= 0],
    "metrics": [one.name for one in REGISTRY.collect() if one.name.startswith("leyden")],
    "hidden": [name for name in ("numpy", "pygments", "rich", "torch") if name in sys.modules],
    "random": random.random(), "session": os.getsid(0), "threads": len(os.listdir("/proc/self/task")),
    "main": sys.modules["__main__"].__spec__.name,
}))
if "STATUS" in os.environ:
    sys.exit(int(os.environ["STATUS"]))
signal.pause()
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ForkServer]:
    (tmp_path / "program.py").write_text(PROGRAM)
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    command = [sys.executable, "-P", "-m", fork_server.__name__]
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    variables = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    with theirs, (tmp_path / "server.log").open("wb") as log:
        popen = subprocess.Popen(command, env=variables, cwd=tmp_path, stdin=theirs.fileno(), stdout=log, stderr=log)
    started = ForkServer(popen, ours)
    yield started
    started.close()


def started(server: ForkServer, log: Path, variables: dict[str, str], **descriptors: int) -> ForkedProcess:
    with log.open("ab") as file:
        return server.start("program", variables, file.fileno(), descriptors)


def has_ended(pid: int) -> bool:
    """Whether a process has ended, though a container's first process may never ask for its status."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def printed(log: Path) -> dict[str, Any]:
    until(lambda: log.read_text().endswith("\n"))
    found: dict[str, Any] = json.loads(log.read_text())
    return found


def test_a_fork_begins_with_its_own_variables_descriptors_and_log_and_nothing_else(
    server: ForkServer, tmp_path: Path
) -> None:
    one, other = tmp_path / "one.log", tmp_path / "other.log"
    read_end, write_end = os.pipe()
    first = started(server, one, {"A_WORD": "of one"}, PIPE_FD=write_end)
    second = started(server, other, {"STATUS": "3"})
    pipe = str(Path(f"/proc/self/fd/{write_end}").readlink())
    os.close(read_end)
    os.close(write_end)
    assert second.wait() == 3
    seen, of_other = printed(one), printed(other)
    number = seen["variables"].pop("PIPE_FD")
    assert (seen["variables"], of_other["variables"]) == ({"A_WORD": "of one"}, {"STATUS": "3"})
    files = {"0": os.devnull, "1": str(one), "2": str(one), number: pipe}
    assert seen["descriptors"] == files
    assert of_other["descriptors"] == {"0": os.devnull, "1": str(other), "2": str(other)}
    assert (seen["session"], of_other["session"]) == (first.pid, second.pid)
    assert seen["random"] != of_other["random"]
    assert seen["main"] == "program"
    assert first.poll() is None
    first.kill()
    assert (first.wait(), first.poll()) == (-signal.SIGKILL, -signal.SIGKILL)


def test_at_the_fork_no_thread_event_loop_socket_or_tracer_exists(server: ForkServer, tmp_path: Path) -> None:
    process = started(server, tmp_path / "log", {})
    assert len(psutil.Process(server.popen.pid).threads()) == 1
    # Standard input is the socket to the supervisor, and the fork server has a copy of it.
    of_server = [str(one.readlink()) for one in Path(f"/proc/{server.popen.pid}/fd").iterdir()]
    assert len(of_server) == 4
    assert len(set(of_server)) == 2
    seen = printed(tmp_path / "log")
    assert (seen["threads"], seen["live"], seen["hidden"]) == (1, ["_MainThread"], [])
    # A service shows the metrics of its own modules alone.
    assert set(seen["metrics"]) == {"leyden_body_bytes", "leyden_http_refusals"}
    process.kill()
    process.wait()


def test_forks_die_with_their_server_which_can_be_asked_no_more(server: ForkServer, tmp_path: Path) -> None:
    process = started(server, tmp_path / "log", {})
    printed(tmp_path / "log")
    server.popen.kill()
    assert process.wait() == -signal.SIGKILL
    until(lambda: has_ended(process.pid))
    with pytest.raises(ConnectionError, match=r"fork-server\.log"):
        started(server, tmp_path / "log", {})


def test_a_fork_whose_request_does_not_arrive_ends(server: ForkServer, tmp_path: Path) -> None:
    no_descriptor = -1
    with pytest.raises(OSError, match="Bad file descriptor"):
        server.start("program", {}, no_descriptor, {})
    assert psutil.Process(server.popen.pid).children() == []
    process = started(server, tmp_path / "log", {"STATUS": "3"})
    assert process.wait() == 3


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    home = tmp_path_factory.mktemp("forks") / "home"
    running = Platform(home, Options(free_ports=True, services=SERVICES, model_path=home.parent))
    running.start()
    try:
        running.ready(120)
        yield running
    finally:
        running.stop()


def parent(platform: Platform) -> psutil.Process:
    """The one parent of all services."""
    (found,) = {psutil.Process(pid).ppid() for pid in platform.pids().values()}
    return psutil.Process(found)


def test_services_are_forks_that_ps_names_and_share_no_socket_or_pipe(platform: Platform) -> None:
    assert fork_server.__name__ in parent(platform).cmdline()
    assert "LEYDEN_DATABASE_URL" not in parent(platform).environ()
    seen: set[str] = set()
    for name, pid in platform.pids().items():
        assert f"leyden.services.{name}" in psutil.Process(pid).cmdline()
        assert os.getsid(pid) == pid
        links = {str(one.readlink()) for one in Path(f"/proc/{pid}/fd").iterdir()}
        assert str(platform.home / "logs" / f"{name}.log") in links
        own = {link for link in links if link.startswith(("socket:", "pipe:"))}
        assert not own & seen
        seen |= own


def test_a_killed_service_starts_again_alone(platform: Platform) -> None:
    before = platform.pids()
    os.kill(before["api"], signal.SIGKILL)
    until(lambda: platform.pids().get("api", before["api"]) != before["api"])
    assert platform.pids() | {"api": before["api"]} == before
    assert health(platform) == 200


def test_a_killed_fork_server_and_its_services_start_again(platform: Platform) -> None:
    before, old = platform.pids(), parent(platform)
    old.kill()
    until(lambda: platform.pids().keys() == before.keys() and not set(platform.pids().values()) & set(before.values()))
    assert health(platform) == 200
    assert parent(platform) != old
    until(lambda: all(map(has_ended, before.values())))
