"""Agents that print no reward learn from scripted judges that are busy or talk nonsense now and then."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import psycopg
import pytest
from rich.console import Console

from leyden.libs.cli.local.platform import Platform
from leyden.libs.cli.view.watch import watch_run
from leyden.libs.client import Client
from tests.campaigns.soak import QUICK, bandit_run, small_platform
from tests.fakes.judge import Said, ScriptedJudge, compared, judge_beside, ranked, scored
from tests.invariants import violations
from tests.support.long import long_only

STEPS = 26
KEY = "the-key-of-the-judge"
# The number of the task makes more questions than the two answers: equal ones are asked once.
HELPFUL: dict[str, Any] = {
    "name": "helpful",
    "grader": {
        "type": "score_model",
        "provider": "judge",
        "model": "m",
        "rubric": "Task {task.number}: 5 for an odd answer, 1 for any other.",
        "votes": 2,
    },
}


BETTER = {"name": "better", "grader": {**HELPFUL["grader"], "type": "relative_model"}}
RIGHT = {"name": "right", "weight": 0.0, "grader": {"type": "regex", "pattern": '"odd"'}}


def choosy() -> Callable[[dict[str, Any], int], Said]:
    """As `moody`, and compares: it leaves out an output now and then."""
    incomplete = Counter[str]()

    def answered(body: dict[str, Any], number: int) -> Said:
        rules = body["messages"][0]["content"]
        if number % 9 == 3:
            return Said(status=429, headers={"retry-after": "1"})
        scores: dict[str, object] = {name: float('"odd"' in text) for name, text in compared(body).items()}
        task = rules[rules.index("Task") :].partition(":")[0]
        if number % 9 == 6 and incomplete[task] < 2:
            incomplete[task] += 1
            scores.popitem()
        return ranked(scores)

    return answered


def moody() -> Callable[[dict[str, Any], int], Said]:
    """A judge that is busy with every ninth call, and answers another ninth without a score, but none of a task more
    than twice: a third such answer to one vote fails it."""
    scoreless = Counter[str]()

    def answered(body: dict[str, Any], number: int) -> Said:
        rules, question = (message["content"] for message in body["messages"])
        if number % 9 == 3:
            return Said(status=429, headers={"retry-after": "1"})
        task = rules[rules.index("Task") :].partition(":")[0]
        if number % 9 == 6 and scoreless[task] < 2:
            scoreless[task] += 1
            return Said("I would rather not say.")
        return scored(5 if '"odd"' in question else 1)

    return answered


@pytest.fixture
def judge() -> Iterator[ScriptedJudge]:
    with judge_beside() as scripted:
        scripted.answer = moody()
        yield scripted


@pytest.fixture
def platform(tmp_path: Path, judge: ScriptedJudge) -> Iterator[Platform]:
    key = tmp_path / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    providers = json.dumps({"judge": {"url": judge.url, "api_key_file": str(key)}})
    with small_platform(tmp_path, GRADER_PROVIDERS=providers) as running:
        yield running


@long_only
@pytest.mark.timeout(900)
def test_an_agent_without_a_reward_line_learns_from_a_judge(
    platform: Platform, client: Client, judge: ScriptedJudge, received: Path
) -> None:
    client.upload_dataset("judged", [{"number": number} for number in range(16)])
    evaluation = {"dataset": "judged", "rollouts_per_task": 4}
    document = bandit_run(received, "judged", STEPS, evaluation=evaluation, reward={"components": [HELPFUL]}, **QUICK)
    document["dataset"] = "judged"
    document["agent"]["environment"]["BANDIT_SILENT"] = "1"
    run = watch_run(client, client.create_run(document).id, Console(quiet=True))
    assert (run.phase, run.reason) == ("completed", None)

    first, last = sorted(client.evaluations(run.id), key=lambda one: one.number)
    assert first.results.reward is not None and last.results.reward is not None
    assert first.results.reward.mean < 0.85 and last.results.reward.mean > 0.95
    assert violations(platform.facts.database_url, run.id) == {}

    # Each vote is asked until it has a score: no rollout is lost, and none is a 0 in the place of a failure.
    (curve,) = client.metrics(run.id, ["component.helpful.failed_share"]).series
    assert {value for _, _, value in curve.points} == {0.0}
    assert len(judge.bodies) > 32
    assert set(judge.keys) == {f"Bearer {KEY}"}
    with psycopg.connect(platform.facts.database_url) as connection:
        stored = connection.execute(
            "SELECT extracted, value, count(*) FROM rollout_rewards WHERE run_id = %s GROUP BY 1, 2 ORDER BY 2",
            [run.id],
        ).fetchall()
    assert [(extracted, value) for extracted, value, _ in stored] == [("1, 1", 0.0), ("5, 5", 1.0)]


@long_only
@pytest.mark.timeout(900)
def test_an_agent_without_a_reward_line_learns_from_a_judge_that_compares(
    platform: Platform, client: Client, judge: ScriptedJudge, received: Path
) -> None:
    judge.answer = choosy()
    client.upload_dataset("judged", [{"number": number} for number in range(16)])
    document = bandit_run(received, "compared", STEPS, reward={"components": [BETTER, RIGHT]}, **QUICK)
    document["dataset"] = "judged"
    document["agent"]["environment"]["BANDIT_SILENT"] = "1"
    run = watch_run(client, client.create_run(document).id, Console(quiet=True))
    assert (run.phase, run.reason) == ("completed", None)

    metrics = client.metrics(run.id, ["component.right.mean", "component.better.failed_share"])
    curves = {one.name: [value for _, _, value in one.points] for one in metrics.series}
    assert len(curves["component.right.mean"]) == STEPS
    assert fmean(curves["component.right.mean"][:2]) < 0.85
    assert fmean(curves["component.right.mean"][-4:]) > 0.95
    assert set(curves["component.better.failed_share"]) == {0.0}
    assert violations(platform.facts.database_url, run.id) == {}
    # Siblings have one comparison: two outputs have 0 and 1, and equal ones 0.5.
    with psycopg.connect(platform.facts.database_url) as connection:
        mixed = connection.execute(
            "SELECT array_agg(DISTINCT w.value ORDER BY w.value) FROM rollout_rewards w"
            " JOIN rollouts r ON r.id = w.rollout_id WHERE w.run_id = %s AND w.component = 'better'"
            " GROUP BY r.group_id",
            [run.id],
        ).fetchall()
    assert {tuple(values) for (values,) in mixed} <= {(0.0, 1.0), (0.5,)}
    assert ([0.0, 1.0],) in mixed
