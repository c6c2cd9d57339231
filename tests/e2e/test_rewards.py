"""An agent that prints no reward learns from a grader, which is killed between grading and writing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from rich.console import Console

from leyden.libs.cli.commands.rollouts import trajectory
from leyden.libs.cli.local import managed_service
from leyden.libs.cli.local.platform import Platform
from leyden.libs.cli.view.watch import watch_run
from leyden.libs.client import Client
from leyden.libs.faults import FaultInjector
from tests.campaigns.soak import QUICK, bandit_run, small_platform
from tests.invariants import violations
from tests.support.long import long_only

STEPS = 26
POINTS = ("grader.leased", "grader.graded", "grader.total_written", "grader.settled")
COMPONENTS = [
    {
        "name": "answer",
        "weight": 0.9,
        "grader": {"type": "token_f1", "output": "{output.answer}", "reference": "{task.answer}"},
    },
    {"name": "format", "weight": 0.1, "grader": {"type": "regex", "pattern": '^{"answer": "[a-z]+"}$'}},
    {"name": "words", "weight": 0.0, "grader": {"type": "length", "at_most": 8}},
]


@pytest.fixture
def injector(tmp_path: Path) -> FaultInjector:
    return FaultInjector(tmp_path / "faults")


@pytest.fixture
def platform(tmp_path: Path, injector: FaultInjector, monkeypatch: pytest.MonkeyPatch) -> Iterator[Platform]:
    monkeypatch.setattr(managed_service, "MAX_BACKOFF_SECONDS", 0.5)
    with small_platform(tmp_path, **injector.environment, GRADER_LEASE_SECONDS="2") as running:
        yield running


def silent_run(log: Path) -> dict[str, Any]:
    evaluation = {"dataset": "graded", "rollouts_per_task": 4}
    document = bandit_run(log, "silent", STEPS, evaluation=evaluation, reward={"components": COMPONENTS}, **QUICK)
    document["dataset"] = "graded"
    document["agent"]["environment"]["BANDIT_SILENT"] = "1"
    return document


@long_only
@pytest.mark.timeout(900)
def test_an_agent_without_a_reward_line_learns_from_a_grader_that_is_killed(
    platform: Platform, client: Client, injector: FaultInjector, received: Path
) -> None:
    client.upload_dataset("graded", [{"number": number, "answer": "odd"} for number in range(16)])
    created = client.create_run(silent_run(received))
    for point in POINTS:
        injector.arm(point)
        assert injector.fired(point, 120)
    run = watch_run(client, created.id, Console(quiet=True))
    assert (run.phase, run.reason) == ("completed", None)

    # The evaluations before and after: every rollout is graded, and the mean is that of the settled totals.
    first, last = sorted(client.evaluations(run.id), key=lambda one: one.number)
    for evaluation in (first, last):
        assert (evaluation.results.complete, evaluation.results.pending) == (True, 0)
        assert evaluation.results.reward is not None
        assert evaluation.results.reward.mean == pytest.approx(totals_of_evaluation(platform, evaluation.id), abs=1e-9)
    assert first.results.reward is not None and last.results.reward is not None
    assert first.results.reward.mean < 0.85 and last.results.reward.mean > 0.95

    # The curve, credit and the rollout's page show the same number, and the invariants compare them with the sums.
    for step in client.steps(run.id):
        assert step.reward_mean == pytest.approx(totals_of_step(platform, run.id, step.number), abs=1e-9)
    assert violations(platform.facts.database_url, run.id) == {}
    rollout = client.rollout(next(iter(client.rollouts(run=run.id, state="finished"))).id)
    assert [one.component for one in rollout.components] == ["answer", "format", "words"]
    value = sum(one.weight * (one.value or 0.0) for one in rollout.components)
    assert rollout.reward == pytest.approx(value, abs=1e-9)
    console = Console(width=200, record=True)
    for part in trajectory(rollout, [], []):
        console.print(part)
    shown = console.export_text()
    assert "reward answer" in shown
    assert "from token_f1: F1" in shown


def totals_of_step(platform: Platform, run_id: str, step: int) -> float:
    return _mean(
        platform,
        "SELECT avg(d.total) FROM step_groups s JOIN rollouts r ON r.group_id = s.group_id AND r.state = 'finished'"
        " JOIN gradings d ON d.rollout_id = r.id AND d.attempt = r.attempt WHERE s.run_id = %s AND s.step = %s",
        run_id,
        step,
    )


def totals_of_evaluation(platform: Platform, evaluation: str) -> float:
    return _mean(
        platform,
        "SELECT avg(d.total) FROM groups g JOIN rollouts r ON r.group_id = g.id AND r.state = 'finished'"
        " JOIN gradings d ON d.rollout_id = r.id AND d.attempt = r.attempt WHERE g.evaluation_id = %s",
        evaluation,
    )


def _mean(platform: Platform, statement: str, *values: object) -> float:
    with psycopg.connect(platform.facts.database_url) as connection:
        row = connection.execute(statement.encode(), values).fetchone()
    assert row is not None
    return float(row[0])
