"""A whole platform on free ports in a folder of its own, serving a tiny random model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from libs.cli.platform import Options, Platform
from libs.client import Leyden

AGENTS = Path(__file__).parent / "agents"


@pytest.fixture
def platform(tmp_path: Path, tiny_model: Path) -> Iterator[Platform]:
    """Every service as a process, restarted when it dies."""
    threads = {"OMP_NUM_THREADS": "1"}
    running = Platform(
        tmp_path / "home",
        Options(model_path=tiny_model, free_ports=True, environment={"engine": threads, "trainer": threads}),
    )
    running.start()
    try:
        running.ready(120)
        yield running
    finally:
        running.stop()


@pytest.fixture
def client(platform: Platform) -> Iterator[Leyden]:
    with Leyden(platform.facts.url("api"), platform.token) as opened:
        yield opened


@pytest.fixture
def bandit(client: Leyden, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """A run document of the two-armed bandit; sections given replace or extend the defaults."""
    client.upload_dataset("bandit", [{"number": number} for number in range(16)])

    def document(**sections: dict[str, Any]) -> dict[str, Any]:
        defaults: dict[str, Any] = {
            "agent": {
                "command": ["{python}", "-I", "-S", str(AGENTS / "bandit.py")],
                "environment": {"BANDIT_LOG": str(tmp_path / "received.log")},
            },
            "runner": {"timeout_seconds": 120},
            "sampling": {"group_size": 8, "groups_per_step": 4},
            "optimizer": {"learning_rate": 0.01},
            "training": {"steps": 8},
        }
        merged = {name: defaults.get(name, {}) | sections.get(name, {}) for name in defaults | sections}
        return {"name": "bandit", "dataset": "bandit", **merged}

    return document
