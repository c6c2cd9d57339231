"""An agent's pod waits until the canary is closed and the gateway open, and says why it never was."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from leyden.services.runner.backends.kubernetes import wait_for_policies
from leyden.services.runner.backends.kubernetes.wait_for_policies import main, wait


@contextmanager
def listening() -> Iterator[tuple[socket.socket, str]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server, f"127.0.0.1:{server.getsockname()[1]}"


def test_it_begins_once_the_canary_is_closed() -> None:
    with listening() as (canary, address), listening() as (_, gateway):
        began = time.monotonic()
        threading.Timer(0.5, canary.close).start()
        assert wait(address, gateway, 30) is None
        assert time.monotonic() - began >= 0.4


def test_a_canary_that_stays_open_is_the_reason() -> None:
    with listening() as (_, canary), listening() as (_, gateway):
        reason = wait(canary, gateway, 0.2)
    assert reason is not None and f"the canary address {canary} is open" in reason
    assert "rollouts.policyWait.canary" in reason
    assert "rollouts.allowInternet a public address" in reason


def test_a_network_that_does_not_work_yet_is_no_closed_canary() -> None:
    with listening() as (_, gateway):
        pass
    assert f"the gateway {gateway} is closed" in (wait("127.0.0.1:1", gateway, 0.2) or "")


def test_a_graders_pod_waits_for_the_canary_alone() -> None:
    with listening() as (_, canary):
        assert f"the canary address {canary} is open" in (wait(canary, None, 0.2) or "")
    assert wait(canary, None, 0.2) is None
    # Policies close name lookups, too.
    assert wait("no-such-host.invalid:443", None, 0.2) is None


def test_a_canary_without_a_host_is_not_closed() -> None:
    with listening() as (_, gateway):
        assert "correct rollouts.policyWait.canary" in (wait("no-such-host.invalid:443", gateway, 0.2) or "")


def test_its_last_words_are_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(wait_for_policies, "LAST_WORDS", tmp_path / "words")
    with listening() as (_, canary), listening() as (_, gateway):
        host, _, port = canary.rpartition(":")
        for name, value in {
            "KUBERNETES_SERVICE_HOST": host,
            "KUBERNETES_SERVICE_PORT": port,
            "POLICY_GATEWAY": gateway,
            "POLICY_SECONDS": "0.1",
        }.items():
            monkeypatch.setenv(name, value)
        assert main() == 1
        monkeypatch.setenv("POLICY_CANARY", "127.0.0.1:1")
        assert main() == 0
    assert (tmp_path / "words").read_text().startswith("policies did not hold within 0.1 s: the canary")
