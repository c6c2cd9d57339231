"""A service that dies starts again behind sockets that stay open."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator

import httpx
import pytest

from leyden.libs.cli.local.platform import Options, Platform
from tests.contract.cli.test_platform import recorded
from tests.support.waiting import until

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


def test_a_client_waits_while_a_killed_service_starts_again(platform: Platform) -> None:
    killed = platform.pids()["api"]
    os.kill(killed, signal.SIGKILL)
    until(lambda: platform.pids().get("api") != killed)
    assert health(platform) == 200


def test_a_full_disk_and_the_death_of_a_service_end_nothing(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, refused = platform.pids(), []

    def full(*_: object) -> None:
        refused.append(1)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("leyden.libs.cli.local.platform.write_record", full)
        os.kill(before["credit"], signal.SIGKILL)
        until(lambda: len(refused) > 1 and platform.pids().get("credit", before["credit"]) != before["credit"])
    until(lambda: recorded(platform.home).services["credit"].process.pid == platform.pids()["credit"])
    assert platform.failure is None
    assert platform.ready(60).state == "ready"
    assert list(platform.home.glob(".platform*")) == []
