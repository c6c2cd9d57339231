"""Versions are compared on the tasks that every compared evaluation counted, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from leyden.libs.store import tables, training
from leyden.libs.store.database import Database
from leyden.libs.store.read.best import best_version, measured_tasks
from tests.support import builders

PLAN = {"evaluation": {"dataset": "held-out", "every": 1}, "training": {"steps": 4}}
"""Evaluations 1 to 5 are the plan's: versions 0 to 3 and the last one."""


async def run_with_versions(database: Database, **document: Any) -> tables.Run:
    dataset = await builders.add_dataset(database, [{"question": n} for n in range(4)], name="held-out")
    run = await builders.add_run(database, dataset_id=dataset.id, config=builders.run_document(**{**PLAN, **document}))
    for version in range(5):
        await builders.add_policy_version(database, run, version)
    return run


async def measure(
    database: Database,
    run: tables.Run,
    number: int,
    version: int,
    rewards: Sequence[float | None],
    *,
    asked: int = 4,
    rollouts: int = 1,
    lost: str = "excluded",
    agents: Sequence[str | None] = (None,),
) -> None:
    """Evaluation `number` of a version.

    Args: rewards: of the first tasks' rollouts, those of each agent together; None for one that was lost; lost: its
        state
    """
    name = f"{run.id}.e{number}"
    async with database.session() as session:
        session.add(
            tables.Evaluation(
                id=name,
                run_id=run.id,
                number=number,
                dataset_id=run.dataset_id,
                policy_version=version,
                rollouts_per_task=rollouts,
                max_tasks=asked,
                agents=len(agents),
            )
        )
    for place in range(len(rewards) // rollouts):
        _, made = await builders.add_group(
            database,
            run,
            place,
            size=rollouts,
            task_number=place // len(agents),
            agent=agents[place % len(agents)],
            evaluation_id=name,
            admitted_version=version,
            state="complete",
        )
        for rollout, reward in zip(made, rewards[place * rollouts :], strict=False):
            if reward is not None:
                await builders.finish_rollout(database, rollout, reward=reward)
                continue
            async with database.session() as session:
                (await session.get_one(tables.Rollout, rollout.id)).state = lost


async def best(database: Database, run: tables.Run) -> tuple[int | None, str | None]:
    """The best version and how it was found."""
    async with database.read() as session:
        return (await best_version(session, run.id))[:2]


async def test_versions_are_compared_on_the_tasks_that_all_counted(database: Database) -> None:
    run = await run_with_versions(database)
    # Version 2 lost its two hard tasks: its mean over the others is higher, and on the same tasks it is worse.
    await measure(database, run, 2, 1, [1.0, 0.9, 0.2, 0.2])
    await measure(database, run, 3, 2, [0.8, 0.9, None, None])
    assert await best(database, run) == (1, "by evaluations, on the 2 of 4 tasks that each of them counted")


async def test_a_task_weighs_the_same_however_many_of_its_rollouts_were_lost(database: Database) -> None:
    run = await run_with_versions(database)
    await measure(database, run, 2, 1, [1.0, 1.0, 0.0, 0.0], asked=2, rollouts=2)
    await measure(database, run, 3, 2, [1.0, 1.0, 0.1, None], asked=2, rollouts=2)
    await measure(database, run, 4, 3, [1.0, 0.8, None, 0.0], asked=2, rollouts=2)
    assert await best(database, run) == (2, "by evaluations")


async def test_a_task_counts_where_each_agent_has_a_reward(database: Database) -> None:
    run = await run_with_versions(database)
    agents = ("good", "bad")
    await measure(database, run, 2, 1, [1.0, 0.2, 0.8, 0.2], asked=2, agents=agents)
    # The good agent alone: its mean is that of no version.
    await measure(database, run, 3, 2, [1.0, None, 0.8, None], asked=2, agents=agents)
    reason = "by evaluations; not compared: evaluation 3 (version 2; 0 of 2 tasks counted)"
    assert await best(database, run) == (1, reason)
    async with database.read() as session:
        means = [one.means for one in await measured_tasks(session, run.id)]
    assert means == [{0: pytest.approx(0.6), 1: pytest.approx(0.5)}, {}]


async def test_rounding_makes_no_version_better_than_a_newer_one(database: Database) -> None:
    run = await run_with_versions(database)
    rewards = (0.1, 0.2, 0.3)
    assert sum(rewards) > sum(reversed(rewards))
    await measure(database, run, 2, 1, rewards, asked=1, rollouts=3)
    await measure(database, run, 3, 2, rewards[::-1], asked=1, rollouts=3)
    assert await best(database, run) == (2, "by evaluations")


async def test_an_evaluation_that_lost_most_of_its_tasks_is_compared_with_none(database: Database) -> None:
    run = await run_with_versions(database)
    await measure(database, run, 2, 1, [0.5, 0.5, 0.5, 0.5])
    await measure(database, run, 3, 2, [None, None, None, 1.0])
    reason = "by evaluations; not compared: evaluation 3 (version 2; 1 of 4 tasks counted)"
    assert await best(database, run) == (1, reason)
    # Measured again by hand, the version is compared.
    await measure(database, run, 6, 2, [0.9, 0.9, 0.9, 0.9])
    assert (await best(database, run))[0] == 2


async def test_a_cancelled_evaluation_is_compared_with_none(database: Database) -> None:
    run = await run_with_versions(database)
    await measure(database, run, 2, 1, [0.5, 0.5, 0.5, 0.5])
    # The tasks that ended before the cancellation are the quick ones.
    await measure(database, run, 3, 2, [1.0, 1.0, 1.0, None], lost="cancelled")
    assert await best(database, run) == (1, "by evaluations")


async def test_no_version_is_best_where_nothing_can_be_compared(database: Database) -> None:
    run = await run_with_versions(database)
    _, rollouts = await builders.add_group(database, run, 0, admitted_version=3, state="complete")
    for rollout in rollouts:
        await builders.finish_rollout(database, rollout, reward=1.0)
    assert await best(database, run) == (3, "by training, each version on other tasks: no evaluation measured one")
    await measure(database, run, 2, 1, [None, None, None, None])
    reason = "not compared: evaluation 2 (version 1; 0 of 4 tasks counted)"
    assert await best(database, run) == (None, reason)
    async with database.session() as session:
        kept = await training.prune_versions(session, run.id, 4)
    # A regrade may repair the evaluation, and its version is still there.
    assert kept.versions == {0, 1, 4}


async def test_a_version_stays_until_its_evaluation_is_compared(database: Database) -> None:
    run = await run_with_versions(database)
    await measure(database, run, 2, 1, [0.5, 0.5, 0.5, 0.5])
    await measure(database, run, 3, 2, [None, None, None, 1.0])
    assert (await best(database, run))[0] == 1
    async with database.session() as session:
        assert (await training.prune_versions(session, run.id, 4)).versions == {0, 1, 2, 4}
    # Measured again, it is compared and worse.
    await measure(database, run, 6, 2, [0.1, 0.1, 0.1, 0.1])
    async with database.session() as session:
        assert (await training.prune_versions(session, run.id, 4)).versions == {0, 1, 4}


async def test_measured_versions_stay_while_none_is_called_best(database: Database) -> None:
    run = await run_with_versions(database)
    await measure(database, run, 2, 1, [1.0, 1.0, None, None])
    await measure(database, run, 3, 2, [None, None, 0.1, 0.1])
    assert (await best(database, run))[0] is None
    async with database.session() as session:
        assert (await training.prune_versions(session, run.id, 4)).versions == {0, 1, 2, 4}


async def test_evaluations_without_a_common_task_compare_nothing(database: Database) -> None:
    run = await run_with_versions(
        database, training={"steps": 4, "early_stopping": {"metric": "evaluation_reward", "target": 0.9}}
    )
    await measure(database, run, 2, 1, [1.0, 1.0, None, None])
    await measure(database, run, 3, 2, [None, None, 0.1, 0.1])
    reason = "no task has a reward in each of its 2 evaluations; nor does training stop early"
    assert await best(database, run) == (None, reason)


async def test_an_evaluation_of_few_tasks_by_hand_leaves_the_plans_tasks(database: Database) -> None:
    run = await run_with_versions(database)
    await measure(database, run, 2, 1, [0.0, 0.9, 0.9, 0.9])
    await measure(database, run, 3, 2, [0.5, 0.5, 0.5, 0.5])
    expected = (1, "by evaluations")
    assert await best(database, run) == expected
    # One asked for the first task alone; one lost half of its tasks.
    await measure(database, run, 6, 2, [1.0], asked=1)
    assert await best(database, run) == expected
    await measure(database, run, 7, 3, [None, None, 1.0, 1.0])
    lost = "not compared: evaluation 7 (version 3; 2 of 4 tasks counted)"
    assert await best(database, run) == (1, f"by evaluations; {lost}")
    # One that counted all of the plan's tasks is compared.
    await measure(database, run, 8, 3, [1.0, 1.0, 1.0, 1.0])
    assert (await best(database, run))[0] == 3


async def test_a_reward_that_is_still_to_come_is_not_zero(database: Database) -> None:
    run = await run_with_versions(database, runner={"type": "process", "stdout_reward": False})
    await measure(database, run, 2, 1, [0.1] * 4)
    await measure(database, run, 3, 2, [])
    for task in range(4):
        _, (rollout,) = await builders.add_group(
            database, run, task, size=1, task_number=task, evaluation_id=f"{run.id}.e3", admitted_version=2
        )
        await builders.finish_rollout(database, rollout, reward=None)
    assert await best(database, run) == (1, "by evaluations")
    async with database.session() as session:
        session.add_all(
            tables.ExternalReward(rollout_id=f"{run.id}.e3.{task}.0", key="k", name="n", value=0.5) for task in range(4)
        )
    assert (await best(database, run))[0] == 2
