"""A whole platform on free ports in a folder of its own, serving a tiny random model."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from leyden.libs.cli.local.platform import Platform
from leyden.libs.client import Client
from tests.campaigns.soak import small_platform
from tests.support.shared import open_to_agents

_shared: list[Platform] = []
_stop = ExitStack()
# An interrupted session skips the hook below.
atexit.register(_stop.close)


@pytest.fixture
def shared_platform(tmp_path_factory: pytest.TempPathFactory) -> Platform:
    """A platform that consecutive tests share, since starting and stopping one costs 18 seconds of processor time.

    A test reads the rows of its own run alone, and its run has ended when it returns.
    """
    if not _shared:
        _shared.append(_stop.enter_context(small_platform(tmp_path_factory.mktemp("platform"))))
    return _shared[0]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stops the shared platform when the next test does not use it, and after any failure."""
    if item.session.testsfailed or "shared_platform" not in getattr(nextitem, "fixturenames", ()):
        _shared.clear()
        _stop.close()


@pytest.fixture
def platform(shared_platform: Platform) -> Platform:
    """Every service as a process, restarted when it dies."""
    return shared_platform


@pytest.fixture
def client(platform: Platform) -> Iterator[Client]:
    """The API, with a dataset for the bandit."""
    with Client(platform.facts.url("api"), platform.token, patience_seconds=60) as opened:
        opened.upload_dataset("bandit", [{"number": number} for number in range(16)])
        yield opened


@pytest.fixture
def received(tmp_path: Path) -> Path:
    """The file to which the bandit writes every answer that it receives."""
    return open_to_agents(tmp_path / "received.log")
