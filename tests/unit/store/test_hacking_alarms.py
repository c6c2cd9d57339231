"""Alarms against reward hacking, by rows in Postgres: each rule alone, and none while nothing is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import update

from leyden.libs.store import tables
from leyden.libs.store.database import Database
from tests.support import builders
from tests.support.alarms import alarms

LONG_AGO = datetime.now(tz=UTC) - timedelta(hours=2)
JUDGE = {"type": "score_model", "provider": "judge", "model": "m", "rubric": "5: right", "output": "{output}"}
TRUTH = {"type": "token_f1", "output": "{output}", "reference": "{task.answer}"}
REWARD: Mapping[str, Any] = {
    "components": [
        {"name": "judge", "grader": JUDGE},
        {"name": "terse", "weight": -0.5, "grader": {"type": "length", "at_most": 9}},
        {"name": "true", "weight": 0, "grader": TRUTH},
        {"name": "own", "weight": 0, "from": "agent"},
    ]
}
NAMES = [one["name"] for one in REWARD["components"]]
Curve = Callable[[int], float]


async def made(database: Database, config: Mapping[str, Any], steps: int, **curves: Curve) -> tables.Run:
    """A run with steps of one rollout each. Args: curves: by component, `reward`, `tokens` and `calls`, of a step"""
    run = await builders.add_run(database, config=builders.run_document(training={"steps": 99}, **config))
    async with database.session() as session:
        for number in range(1, steps + 1):
            for rows in rows_of(run, number, {name: curve(number) for name, curve in curves.items()}):
                session.add_all(rows)
                await session.flush()
        await session.execute(update(tables.RunStatus).values(updated_at=datetime.now(tz=UTC)))
    return run


def rows_of(run: tables.Run, number: int, value: Mapping[str, float]) -> Iterator[list[Any]]:
    """The rows of a step, those first that others refer to."""
    group, rollout, at = f"{run.id}.{number}", f"{run.id}.{number}.0", LONG_AGO + timedelta(seconds=10 * number)
    task = {"dataset_id": run.dataset_id, "task_number": 0, "size": 1, "admitted_version": 0}
    yield [tables.Group(id=group, run_id=run.id, number=number, **task)]
    ended = {"state": "finished", "attempt": 1, "reward": 0.5, "reason": "succeeded", "finished_at": at}
    yield [tables.Rollout(id=rollout, run_id=run.id, group_id=group, sibling=0, greedy=False, **ended)]
    made = {"metrics": {"trainable_tokens": 9}, "checkpoint": "c", "started_at": at, "created_at": at}
    lease = {"tries": 1, "lease_id": rollout, "owner": "test", "lease_expires_at": at, "settled_at": at, "total": 0.5}
    credit = {"verdict": "credited", "credit_version": 1, "has_variance": True, "min_policy_version": 0}
    counted = {"counted_siblings": 1, "reward_std": 0.1, "calls": {"calls": round(value.get("calls", 2))}}
    keys: dict[str, Any] = {"run_id": run.id, "rollout_id": rollout}
    yield [
        tables.Step(run_id=run.id, number=number, **made),
        tables.Grading(**keys, attempt=1, **lease),
        tables.GroupCredit(
            group_id=group, run_id=run.id, reward_mean=value.get("reward", number / 1000), **credit, **counted
        ),
    ]
    component = {"state": "scored", "weight": 1.0, "explanation": "", "source": "test", "duration_seconds": 0.0}
    yield [
        tables.StepGroup(group_id=group, run_id=run.id, step=number, verdict="trained"),
        *(
            tables.RolloutReward(**keys, attempt=1, component=name, position=place, value=value[name], **component)
            for place, name in enumerate(NAMES)
            if name in value
        ),
        *([sample(keys, group, round(value["tokens"]))] if "tokens" in value else []),
    ]


def sample(keys: Mapping[str, Any], group: str, tokens: int) -> tables.Sample:
    arrays = ("token_ids", "mask", "generator_logprobs", "advantages", "temperatures", "policy_versions")
    lengths = {"length": tokens, "trained_tokens": tokens, "min_policy_version": 0, "branch": 0}
    return tables.Sample(**keys, id=f"{group}:0", group_id=group, **lengths, **dict.fromkeys(arrays, b""))


def up(number: int) -> float:
    return 0.3 + number / 100 + (number % 3) / 100


def down(number: int) -> float:
    return 1.2 - up(number)


def level(number: int) -> float:
    return 0.5 + (number % 3) / 100


CURRICULUM = {"group_size": 2, "groups_per_step": 1, "curriculum": {}}


@pytest.mark.parametrize(
    ("curves", "config", "names"),
    [
        ({"judge": up, "reward": down}, {}, ["component_rises_alone judge"]),
        ({"terse": down, "reward": down}, {}, ["component_rises_alone terse"]),
        ({"terse": up, "true": up, "own": up, "reward": down}, {}, []),
        ({"judge": up, "reward": level}, {}, []),
        ({"judge": up, "reward": down}, {"sampling": CURRICULUM}, []),
        ({"judge": up, "true": down, "own": down, "reward": up}, {}, ["judge_alone judge, true"]),
        ({"judge": up, "own": down, "reward": up}, {}, []),
        ({"judge": lambda n: 0.9 if n > 28 else level(n), "true": level}, {}, ["component_jump judge"]),
        ({"tokens": lambda n: 20 * up(n), "reward": up}, {}, ["answers_grow"]),
        ({"tokens": lambda n: 20 * up(n), "reward": level}, {}, []),
        ({"tokens": lambda n: 1 if n > 25 else 9}, {}, ["rollouts_shrink tokens"]),
        ({"calls": lambda n: 1 if n > 25 else 9}, {}, ["rollouts_shrink calls"]),
    ],
)
async def test_each_rule_raises_its_alarm_alone(
    database: Database, curves: dict[str, Curve], config: dict[str, Any], names: list[str]
) -> None:
    given = {"reward": REWARD, **config}
    run = await made(database, given, 30, **curves)
    found = await alarms(database, run.id)
    assert list(found) == names
    assert all(one.reason and one.evidence and one.remedy and one.severity == "warning" for one in found.values())
    young = await made(database, given, 11, **curves)
    assert await alarms(database, young.id) == {}


async def test_held_out_rewards_that_fall_are_judged_by_whole_evaluations(database: Database) -> None:
    tasks = [{"question": str(number)} for number in range(10)]
    held_out = await builders.add_dataset(database, tasks, name="held out")
    run = await made(database, {"evaluation": {"dataset": "held out", "every": 10}}, 20, reward=up)

    for number, version in enumerate((0, 10, 20), 1):
        columns = {"policy_version": version or None, "rollouts_per_task": 1, "dataset_id": held_out.id}
        async with database.session() as session:
            session.add(tables.Evaluation(id=f"{run.id}.e{number}", run_id=run.id, number=number, **columns))

    async def measure(version: int, numbers: range) -> None:
        owner = {"evaluation_id": f"{run.id}.e{version // 10 + 1}", "dataset_id": held_out.id, "state": "complete"}
        for task in numbers:
            columns = {"size": 1, "admitted_version": version, "task_number": task}
            _, [rollout] = await builders.add_group(database, run, task, **columns, **owner)
            await builders.finish_rollout(database, rollout, reward=0.9 - version * (1 + task % 3) / 100)

    for version, counted in ((0, 10), (10, 10), (20, 9)):
        await measure(version, range(counted))
    assert "held_out_falls" not in await alarms(database, run.id)
    await measure(20, range(9, 10))
    found = (await alarms(database, run.id))["held_out_falls"]
    assert "the reward on 10 held-out tasks falls from 0.9 (version 0)" in found.reason
