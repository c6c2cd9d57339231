"""Kill any process at any moment: the training still completes, and the store shows nothing lost or doubled."""

from __future__ import annotations

import time
from pathlib import Path

import redis
from rich.console import Console

from libs.cli.platform import Platform
from libs.cli.watch import watch_run
from libs.client import Leyden
from tests.soak import VICTIMS, bandit_run, kill
from tests.truth import lost_calls, violations


def _wait_for_rollouts(client: Leyden, run_id: str, more: int, seconds: float = 60.0) -> None:
    """Until some more rollouts have finished, so that the next kill hits work in flight."""
    deadline = time.monotonic() + seconds
    goal = _finished(client, run_id) + more
    while _finished(client, run_id) < goal and time.monotonic() < deadline:
        time.sleep(0.1)


def _finished(client: Leyden, run_id: str) -> int:
    return client.run(run_id).progress.rollouts.get("finished", 0)


def test_each_service_killed_once_in_a_training_that_completes_with_nothing_lost_or_doubled(
    platform: Platform, client: Leyden, received: Path
) -> None:
    run = client.create_run(bandit_run(received, "killed", 12))
    killed = []
    for victim in VICTIMS:
        _wait_for_rollouts(client, run.id, 12)
        assert client.run(run.id).phase == "running", f"the run ended before {victim} was killed: make it longer"
        killed += [victim] if kill(platform, victim, run.id) else []
    redis.Redis.from_url(platform.facts.redis_url).flushall()

    ended = watch_run(client, run.id, Console(quiet=True))
    assert killed == list(VICTIMS)
    assert (ended.phase, ended.reason) == ("completed", None)
    assert len(list(client.steps(run.id))) == 12
    assert violations(platform.facts.database_url, run.id) == {}
    assert lost_calls(platform.facts.database_url, run.id, received) == []
