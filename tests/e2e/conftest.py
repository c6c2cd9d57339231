"""A whole platform on free ports in a folder of its own, serving a tiny random model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from leyden.libs.cli.platform import Platform
from leyden.libs.client import Client
from tests.shared import open_to_agents
from tests.soak import small_platform


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[Platform]:
    """Every service as a process, restarted when it dies."""
    with small_platform(tmp_path) as running:
        yield running


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
