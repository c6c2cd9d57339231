"""The rewards of each agent of a run that has several: by step, by evaluation, and as a filter of rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from sqlalchemy import func

from leyden.libs.client import Client
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from tests.fakes.served_api import TOKEN
from tests.support import builders

AGENTS = [{"name": name, "command": ["/agent"]} for name in ("plain", "other", "idle")]


@pytest.fixture
def leyden(api_url: str) -> Iterator[Client]:
    with Client(api_url, TOKEN, patience_seconds=0.0) as client:
        yield client


async def add_rewards(
    database: Database, run: tables.Run, number: int, agent: str, rewards: tuple[float, ...], **columns: Any
) -> tables.Group:
    columns = {"agent": agent, "runner_type": "process", "state": "complete", **columns}
    group, rollouts = await builders.add_group(database, run, number, size=len(rewards), **columns)
    for rollout, reward in zip(rollouts, rewards, strict=True):
        await builders.finish_rollout(database, rollout, reward=reward)
    return group


async def test_a_run_shows_the_rewards_of_each_agent_and_its_rollouts(leyden: Client, database: Database) -> None:
    run = await builders.add_run(database, config=builders.run_document(agent=None, agents=AGENTS))
    groups = [
        (1, await add_rewards(database, run, 0, "plain", (0.0, 1.0))),
        (1, await add_rewards(database, run, 1, "other", (0.0, 0.0))),
        (2, await add_rewards(database, run, 2, "plain", (1.0, 1.0))),
    ]
    async with database.session() as session:
        for number in (1, 2):
            session.add(tables.Step(run_id=run.id, number=number, metrics={}, checkpoint="", started_at=func.now()))
        await session.flush()
        for number, group in groups:
            session.add(tables.StepGroup(group_id=group.id, run_id=run.id, step=number, verdict="trained"))

    shown = await asyncio.to_thread(leyden.run, run.id)
    assert {name: (one.step, one.rollouts, one.reward_mean) for name, one in shown.agents.items()} == {
        "plain": (2, 2, 1.0),
        "other": (1, 2, 0.0),
        # Nothing is known of it: its mean is no zero.
        "idle": (None, 0, None),
    }
    assert list(shown.agents) == ["plain", "other", "idle"]
    names = ["agent.plain.reward_mean", "agent.other.reward_mean"]
    metrics = await asyncio.to_thread(lambda: leyden.metrics(run.id, names))
    assert [[(step, value) for step, _, value in one.points] for one in metrics.series] == [
        [(1, 0.5), (2, 1.0)],
        [(1, 0.0)],
    ]
    found = await asyncio.to_thread(lambda: list(leyden.rollouts(run=run.id, agent="other")))
    assert {(one.group_id, one.agent) for one in found} == {(groups[1][1].id, "other")}
    group = await asyncio.to_thread(leyden.group, groups[1][1].id)
    assert group.agent == "other"


async def test_an_evaluation_plays_its_tasks_with_each_agent_and_shows_their_rewards(
    leyden: Client, api_http: httpx.AsyncClient, database: Database
) -> None:
    dataset = await builders.add_dataset(database)
    document = builders.run_document(
        agent=None, agents=AGENTS[:2], dataset=dataset.id, evaluation={"dataset": dataset.id}
    )
    created = (await api_http.post("/v1/runs", json=document)).json()
    async with database.session() as session:
        run = await session.get_one(tables.Run, created["id"])
        session.add(tables.RunStatus(run_id=run.id, phase="evaluating"))
    rewards = (("plain", 0, 1.0), ("other", 0, 0.0), ("plain", 1, 1.0))
    for number, (agent, task, reward) in enumerate(rewards):
        columns = {"evaluation_id": f"{run.id}.e1", "task_number": task}
        await add_rewards(database, run, number, agent, (reward,), **columns)
    results = (await asyncio.to_thread(lambda: next(leyden.evaluations(run.id)))).results
    # Two tasks with two agents: the last rollout is missing.
    assert not results.complete and results.counted_tasks == 1
    found = {name: (one.mean, one.tasks) for name, one in results.agents.items()}
    assert found == {"plain": (1.0, 2), "other": (0.0, 1)}
    await add_rewards(database, run, 3, "other", (0.0,), evaluation_id=f"{run.id}.e1", task_number=1)
    results = (await asyncio.to_thread(lambda: next(leyden.evaluations(run.id)))).results
    assert results.complete and results.reward is not None
    # A task is one of the sample, however many agents play it.
    assert (results.reward.mean, results.reward.tasks, results.reward.count) == (0.5, 2, 4)
    assert results.agents["other"].tasks == results.counted_tasks == 2


async def test_rollouts_of_each_task_tell_how_often_several_of_them_solve_it(
    leyden: Client, database: Database
) -> None:
    dataset = await builders.add_dataset(database)
    run = await builders.add_run(database, dataset_id=dataset.id)

    async def measured(number: int, *groups: tuple[float | None, ...]) -> list[tuple[int, float, int]]:
        """The values of k with pass@k and the tasks. Args: groups: the rewards of each task; None for a lost rollout"""
        name = f"{run.id}.e{number}"
        columns = {"dataset_id": dataset.id, "policy_version": 0, "rollouts_per_task": 4, "max_tasks": 2}
        async with database.session() as session:
            session.add(tables.Evaluation(id=name, run_id=run.id, number=number, **columns))
        for task, rewards in enumerate(groups):
            columns = {"size": 4, "task_number": task, "evaluation_id": name, "state": "complete"}
            _, rollouts = await builders.add_group(database, run, task, **columns)
            for rollout, reward in zip(rollouts, rewards, strict=True):
                if reward is not None:
                    await builders.finish_rollout(database, rollout, reward=reward)
                    continue
                async with database.session() as session:
                    (await session.get_one(tables.Rollout, rollout.id)).state = "excluded"
        results = (await asyncio.to_thread(lambda: list(leyden.evaluations(run.id))))[-1].results
        assert results.complete
        return [(one.k, one.mean, one.tasks) for one in results.pass_at]

    # k = 2: 1 - C(3, 2) / C(4, 2) = 1/2, and 1 - C(2, 2) / C(4, 2) = 5/6.
    found = await measured(1, (1.0, 0.0, 0.0, 0.0), (0.0, 0.0, 1.0, 1.0))
    assert found == [(1, pytest.approx(3 / 8), 2), (2, pytest.approx(2 / 3), 2), (4, 1.0, 2)]
    # One without a reward is left out: of three rollouts of the second task two are right, and it has no four.
    found = await measured(2, (1.0, 0.0, 0.0, 0.0), (None, 0.0, 1.0, 1.0))
    assert found == [(1, pytest.approx((1 / 4 + 2 / 3) / 2), 2), (2, 0.75, 2), (4, 1.0, 1)]
    # Half a reward does not tell whether the task is solved.
    assert await measured(3, (1.0, 0.0, 0.0, 0.0), (0.5, 0.0, 1.0, 1.0)) == []
