"""A scripted person teaches an agent that prints no reward; each of the values counts, and a missing one is no 0."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from rich.console import Console

from leyden.libs.cli.local import managed_service
from leyden.libs.cli.local.platform import Platform
from leyden.libs.cli.view.watch import watch_run
from leyden.libs.client import Client
from leyden.libs.faults import FaultInjector
from tests.campaigns.soak import QUICK, bandit_run, small_platform
from tests.invariants import violations
from tests.support.long import long_only
from tests.support.person import Person

STEPS = 12
ROLLOUTS = STEPS * 2 * 8
POINTS = ("api.committed", "grader.leased", "api.created", "grader.graded", "grader.total_written")


@pytest.fixture
def injector(tmp_path: Path) -> FaultInjector:
    return FaultInjector(tmp_path / "faults")


@pytest.fixture
def platform(tmp_path: Path, injector: FaultInjector, monkeypatch: pytest.MonkeyPatch) -> Iterator[Platform]:
    monkeypatch.setattr(managed_service, "MAX_BACKOFF_SECONDS", 0.5)
    with small_platform(tmp_path, **injector.environment, GRADER_LEASE_SECONDS="2") as running:
        yield running


def rated_run(log: Path, name: str, steps: int, seconds: float) -> dict[str, Any]:
    components = [{"name": "thumbs", "from": "feedback"}]
    reward = {"components": components, "wait": {"seconds": seconds}}
    document = bandit_run(log, name, steps, reward=reward, **QUICK)
    document["agent"]["environment"]["BANDIT_SILENT"] = "1"
    return document


@long_only
@pytest.mark.timeout(900)
def test_every_value_that_a_person_gives_within_the_wait_is_trained(
    platform: Platform, client: Client, injector: FaultInjector, received: Path
) -> None:
    created = client.create_run(rated_run(received, "rated", STEPS, 600.0))
    person = Person(client, created.id)
    with person.at_work():
        for point in POINTS:
            injector.arm(point)
            assert injector.fired(point, 120)
        run = watch_run(client, created.id, Console(quiet=True))
    assert (run.phase, run.reason) == ("completed", None)

    rewards = {one.id: one.reward for one in client.rollouts(run=run.id)}
    assert rewards == person.given
    # A group that becomes stale on a slow machine is replaced.
    credited = totals(platform, run.id)
    assert credited.items() <= rewards.items()
    assert len(rewards) >= len(credited) >= ROLLOUTS
    assert violations(platform.facts.database_url, run.id) == {}
    shown = client.rollout(next(iter(rewards)))
    assert [(one.component, one.given_by) for one in shown.feedback] == [("thumbs", "first-admin")]
    means = [step.reward_mean or 0.0 for step in client.steps(run.id)]
    # An untrained policy earns more in 17 of 65,536 steps.
    assert means[0] < 0.93
    assert means[-1] > 0.85


@long_only
@pytest.mark.timeout(300)
def test_a_run_that_nobody_rates_ends_with_that_reason(platform: Platform, client: Client, received: Path) -> None:
    created = client.create_run(rated_run(received, "unrated", 1, 1.0))
    run = watch_run(client, created.id, Console(quiet=True))
    assert (run.phase, run.reason) == ("failed", "no rollout succeeds: ungraded: thumbs: no feedback within 1 s")
    assert {one.reward for one in client.rollouts(run=run.id)} == {None}
    assert violations(platform.facts.database_url, run.id) == {}


@pytest.mark.timeout(300)
@long_only
def test_evaluation_events_of_an_agents_telemetry_are_a_reward(
    platform: Platform, client: Client, received: Path
) -> None:
    reward = {"components": [{"name": "parity", "from": "otlp"}, {"name": "thumbs", "from": "feedback", "weight": 0.0}]}
    document = bandit_run(received, "evaluated", 2, reward={**reward, "wait": {"seconds": 0.0}}, **QUICK)
    document["agent"]["environment"] |= {"BANDIT_SILENT": "1", "BANDIT_EVALUATES": "parity"}
    run = watch_run(client, client.create_run(document).id, Console(quiet=True))
    assert (run.phase, run.reason) == ("completed", None)
    assert {one.reward for one in client.rollouts(run=run.id)} == {1.0, 0.25}
    shown = client.rollout(next(client.rollouts(run=run.id)).id)
    assert [(one.component, one.given_by, one.value) for one in shown.feedback] == [("parity", None, shown.reward)]
    assert violations(platform.facts.database_url, run.id) == {}


def totals(platform: Platform, run_id: str) -> dict[str, float]:
    """The rewards of credited rollouts as credit compared them."""
    with psycopg.connect(platform.facts.database_url) as connection:
        rows = connection.execute(
            "SELECT r.id, r.reward FROM rollouts r JOIN group_credits c ON c.group_id = r.group_id"
            " WHERE r.run_id = %s AND r.state = 'finished' AND c.verdict = 'credited'",
            [run_id],
        ).fetchall()
    return dict(rows)
