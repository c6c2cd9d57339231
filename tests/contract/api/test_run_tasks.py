"""The tasks of a run in the API, through the typed client: attempts, rewards by version, verdicts and failures."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from leyden.libs.client import Client, NotFound, Refused
from leyden.libs.contracts import ids
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from tests.fakes.served_api import TOKEN
from tests.support import builders


@pytest.fixture
def leyden(api_url: str) -> Iterator[Client]:
    with Client(api_url, TOKEN, patience_seconds=0.0) as client:
        yield client


async def add_finished(
    database: Database, run: tables.Run, number: int, task: int, rewards: list[float | None], **columns: Any
) -> list[tables.Rollout]:
    """A group on a task whose rollouts earned these rewards; None fails its agent, before any reward."""
    _, rollouts = await builders.add_group(database, run, number, size=len(rewards), task_number=task, **columns)
    for rollout, reward in zip(rollouts, rewards, strict=True):
        kind = "agent_error" if reward is None else "succeeded"
        await builders.finish_rollout(database, rollout, reward=reward, kind=kind)
    return rollouts


async def five_tasks(database: Database) -> tables.Run:
    """Tasks that are solved by version 1 alone, unsolved, solved, failed, and not begun."""
    dataset = await builders.add_dataset(database, [{"question": f"{number}"} for number in range(6)])
    run = await builders.add_run(database, dataset_id=dataset.id)
    await add_finished(database, run, 0, 0, [0.0, 0.5])
    await add_finished(database, run, 1, 0, [1.0, 1.0], admitted_version=1)
    await add_finished(database, run, 2, 1, [0.0, 0.25])
    await add_finished(database, run, 3, 2, [0.7 + 0.2 + 0.1, 1.5, 0.0], greedy=2)
    await add_finished(database, run, 4, 3, [None, None])
    await builders.add_group(database, run, 5, task_number=4)
    return run


async def test_tasks_have_attempts_means_by_version_a_verdict_and_their_last_failure(
    leyden: Client, database: Database
) -> None:
    run = await five_tasks(database)
    found = await asyncio.to_thread(lambda: list(leyden.run_tasks(run.id)))
    assert [(one.number, one.text) for one in found] == [(number, f'{{"question": "{number}"}}') for number in range(5)]
    assert [one.verdict for one in found] == ["mixed", "unsolved", "solved", None, None]
    assert [one.reward_mean for one in found] == [0.625, 0.125, 1.25, None, None]
    assert [(one.version, one.rollouts, one.reward_mean) for one in found[0].versions] == [(0, 2, 0.25), (1, 2, 1.0)]
    assert [(one.groups, one.rollouts, one.attempts, one.rewarded) for one in found] == [
        (2, 4, 4, 4),
        (1, 2, 2, 2),
        (1, 3, 3, 2),
        (1, 2, 2, 0),
        (1, 2, 0, 0),
    ]
    assert found[0].group_id == ids.group_id(run.id, 1)
    failure = found[3].last_failure
    assert failure is not None and failure.reason == "agent_error"
    assert failure.rollout_id == ids.rollout_id(ids.group_id(run.id, 4), 1)
    assert [one.last_failure for one in found if one is not found[3]] == [None] * 4


async def test_tasks_are_sorted_filtered_and_paged_by_the_server(
    api_http: httpx.AsyncClient, leyden: Client, database: Database
) -> None:
    run = await five_tasks(database)

    async def numbers(**wanted: str) -> list[int]:
        return await asyncio.to_thread(lambda: [one.number for one in leyden.run_tasks(run.id, **wanted)])

    assert await numbers(sort="highest") == [2, 0, 1, 3, 4]
    assert (await numbers(sort="attempts"))[:2] == [0, 2]
    assert (await numbers(sort="failure"))[0] == 3
    assert (await numbers(verdict="mixed"), await numbers(verdict="unknown")) == ([0], [3, 4])

    path, paged, cursor = f"/v1/runs/{run.id}/tasks", list[int](), None
    for page in range(5):
        parameters: dict[str, Any] = {"sort": "lowest", "limit": 1, **({"cursor": cursor} if cursor else {})}
        answer = (await api_http.get(path, params=parameters)).json()
        assert (answer["verdicts"] is None) == (page > 0)
        paged.append(answer["items"][0]["number"])
        cursor = answer["next_cursor"]
    assert (paged, cursor) == (await numbers(sort="lowest"), None)
    first = (await api_http.get(path, params={"verdict": "solved"})).json()
    assert first["verdicts"] == {"mixed": 1, "unsolved": 1, "solved": 1, "unknown": 2}
    begin = (await api_http.get(path, params={"limit": 1})).json()["next_cursor"]
    assert (await api_http.get(path, params={"sort": "highest", "cursor": begin})).status_code == 400


async def test_training_and_an_evaluation_are_apart(leyden: Client, database: Database) -> None:
    run = await builders.add_run(database)
    evaluation = ids.evaluation_id(run.id, 1)
    async with database.session() as session:
        values = {"dataset_id": run.dataset_id, "policy_version": 0, "rollouts_per_task": 2}
        session.add(tables.Evaluation(id=evaluation, run_id=run.id, number=1, **values))
    await add_finished(database, run, 0, 0, [0.0, 0.0])
    await add_finished(database, run, 0, 1, [1.0, 1.0], evaluation_id=evaluation)

    async def verdicts(of: str | None) -> list[tuple[int, str | None]]:
        listed = await asyncio.to_thread(lambda: list(leyden.run_tasks(run.id, evaluation=of)))
        return [(one.number, one.verdict) for one in listed]

    assert await verdicts(None) == [(0, "unsolved"), (1, "solved")]
    assert await verdicts("none") == [(0, "unsolved")]
    assert await verdicts(evaluation) == [(1, "solved")]


async def test_a_reward_that_is_still_to_come_leaves_a_task_unknown(leyden: Client, database: Database) -> None:
    document = builders.run_document(runner={"type": "process", "stdout_reward": False})
    run = await builders.add_run(database, config=document)
    _, rollouts = await builders.add_group(database, run)
    for rollout in rollouts:
        await builders.finish_rollout(database, rollout, reward=None)
        async with database.session() as session:
            (await session.get_one(tables.Rollout, rollout.id)).reward = 0.0
    [task] = await asyncio.to_thread(lambda: list(leyden.run_tasks(run.id)))
    assert (task.verdict, task.reward_mean, task.rewarded, task.last_failure) == (None, None, 0, None)


async def test_an_unknown_run_or_sort_is_named(leyden: Client, database: Database) -> None:
    with pytest.raises(NotFound, match="list runs"):
        await asyncio.to_thread(lambda: list(leyden.run_tasks("nobody")))
    run = await builders.add_run(database)
    with pytest.raises(Refused, match="sort"):
        await asyncio.to_thread(lambda: list(leyden.run_tasks(run.id, sort="prettiest")))
