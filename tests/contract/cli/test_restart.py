"""Processes are replaced behind sockets that stay open: no connection is refused."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from leyden.libs.cli.platform import Options, Platform, PlatformError
from leyden.libs.cli.services import KEYS
from tests.contract.cli.test_platform import ROOT, recorded, wait_for

SERVICES = ("api", "collector", "credit")


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    home = tmp_path_factory.mktemp("restart") / "home"
    running = Platform(home, Options(free_ports=True, services=SERVICES, model_path=home.parent))
    running.start()
    try:
        running.ready(120)
        yield running
    finally:
        running.stop()


def health(platform: Platform) -> int:
    headers = {"authorization": f"Bearer {platform.token}"}
    url = f"{platform.facts.url('api')}/v1/health"
    # Loading the certificates of HTTPS would take 38 ms of CPU time for each of hundreds of calls.
    return httpx.get(url, headers=headers, timeout=60, trust_env=False, verify=False).status_code


class Callers:
    """Clients that ask the API for its health all the time, one after another, and never try again."""

    def __init__(self, platform: Platform) -> None:
        self.answers: list[int | str] = []
        self._platform = platform
        self._enough = threading.Event()
        self._threads = [threading.Thread(target=self._call) for _ in range(4)]

    def _call(self) -> None:
        while not self._enough.is_set():
            try:
                # A connection for each: an idle one may be closed under a request that is on its way.
                self.answers.append(health(self._platform))
            except httpx.TransportError as error:
                self.answers.append(repr(error))

    def __enter__(self) -> Callers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        for thread in self._threads:
            thread.join()


def test_a_service_is_restarted_and_no_connection_is_refused(platform: Platform) -> None:
    before = platform.pids()
    with Callers(platform) as callers:
        wait_for(lambda: len(callers.answers) > 20)
        platform.restart("api", "credit")
        answered = len(callers.answers)
        wait_for(lambda: len(callers.answers) > answered + 20)
    assert set(callers.answers) == {200}
    after = platform.pids()
    assert {name for name in SERVICES if before[name] != after[name]} == {"api", "credit"}
    # A replacement is no death.
    assert {name: one.restarts for name, one in recorded(platform.home).services.items()} == dict.fromkeys(SERVICES, 0)
    assert recorded(platform.home).services["api"].process == platform.record().services["api"].process


def test_a_client_waits_while_a_killed_service_starts_again(platform: Platform) -> None:
    killed = platform.pids()["api"]
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: platform.pids().get("api") != killed)
    assert health(platform) == 200


def leyden(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "leyden.libs.cli", *words, "--home", str(home)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)


def test_the_command_restarts_every_service_and_lists_them(platform: Platform) -> None:
    before = platform.pids()
    result = leyden(platform.home, "restart", "--json")
    assert (result.returncode, json.loads(result.stdout)) == (0, {"restarted": list(SERVICES), "failure": None})
    assert not set(before.values()) & set(platform.pids().values())
    assert list((platform.home / "requests").iterdir()) == []


def test_the_command_names_the_services_and_a_home_without_a_platform(platform: Platform, tmp_path: Path) -> None:
    unknown = leyden(platform.home, "restart", "trainer")
    assert (unknown.returncode, "there are: api, collector, credit" in unknown.stderr) == (3, True)
    nothing = leyden(tmp_path, "restart")
    assert (nothing.returncode, "leyden up" in nothing.stderr) == (4, True)


def test_a_process_that_cannot_start_does_not_replace_the_old_one(platform: Platform) -> None:
    before = platform.pids()
    keys = platform.home / KEYS
    before_edit = keys.read_bytes()
    keys.write_text("no key ring")
    try:
        with pytest.raises(PlatformError, match=r"collector: the new process ended.*the old process continues"):
            platform.restart("collector", "api")
    finally:
        keys.write_bytes(before_edit)
    assert platform.pids() == before
    root = platform.facts.internal_url("collector")
    assert httpx.get(f"{root}/readyz", timeout=60, trust_env=False).status_code == 200


def test_a_full_disk_and_the_death_of_a_service_end_nothing(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, refused = platform.pids(), []

    def full(*_: object) -> None:
        refused.append(1)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("leyden.libs.cli.platform.write_record", full)
        os.kill(before["credit"], signal.SIGKILL)
        wait_for(lambda: len(refused) > 1 and platform.pids().get("credit", before["credit"]) != before["credit"])
    wait_for(lambda: recorded(platform.home).services["credit"].process.pid == platform.pids()["credit"])
    assert platform.failure is None
    assert platform.ready(60).state == "ready"
    assert list(platform.home.glob(".platform*")) == []
