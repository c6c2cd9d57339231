"""The rewards of agents' own failures: none earns more than the work of another attempt."""

from __future__ import annotations

import asyncio
from typing import Any

from sqlalchemy import update

from leyden.libs.contracts import ids
from leyden.libs.store import tables
from leyden.libs.store.read.results import list_evaluations
from leyden.libs.store.runs.rollouts import complete_groups
from leyden.services.controller.worker import take_over
from tests.contract.controller.test_store import Scene, add_run, document
from tests.contract.controller.test_store import scene as scene
from tests.invariants import violations
from tests.support import builders
from tests.support.alarms import alarm_lines


async def _rewards(scene: Scene, run: tables.Run) -> list[tuple[str | None, float | None]]:
    return [(one.reason, one.reward) for one in await scene.rollouts(run)]


async def test_a_failure_earns_the_smallest_reward_of_its_group_and_of_the_run_so_far(scene: Scene) -> None:
    run = await add_run(scene, config=document(groups_per_step=1, max_policy_lag=0, steps=3, group_size=3))
    ends = [("succeeded", -0.5), ("agent_error", None), ("succeeded", 0.25)]
    await scene.tick(2)
    rollouts = await scene.rollouts(run)
    await scene.attempt(rollouts[1], kind="agent_error", reward=None)
    await scene.tick()
    # Siblings are under way: the failure has no reward yet.
    assert (await _rewards(scene, run))[1] == ("agent_error", None)
    for rollout, (kind, reward) in list(zip(rollouts, ends, strict=True))[::2]:
        await scene.attempt(rollout, kind=kind, reward=reward)
    await scene.tick()
    assert await _rewards(scene, run) == [("succeeded", -0.5), ("agent_error", -0.5), ("succeeded", 0.25)]
    for step, expected in ((1, -0.5), (2, -0.5)):
        await scene.credit_and_train(run, step)
        await scene.tick(2)
        for rollout, kind in zip(
            await scene.rollouts(run, "queued"), ("timeout", "succeeded", "succeeded"), strict=True
        ):
            await scene.attempt(rollout, kind=kind, reward=1.0 if kind == "succeeded" else None)
        await scene.tick()
        # Rewards of its own group are above 0, and an earlier one of the run is below.
        assert (await _rewards(scene, run))[3 * step] == ("timeout", expected)
    assert not await _broken(scene, run)


async def test_a_failure_earns_at_most_0_and_rewards_that_were_given_count(scene: Scene) -> None:
    run = await add_run(scene, config=document(groups_per_step=2, max_policy_lag=0))
    await scene.tick(2)
    first, crashed, given, silent = await scene.rollouts(run)
    await scene.attempt(first, kind="succeeded", reward=0.5)
    await scene.attempt(crashed, kind="agent_error", reward=None)
    await scene.tick()
    assert (await _rewards(scene, run))[1] == ("agent_error", 0.0)
    async with scene.database.session() as session:
        key = {"rollout_id": given.id, "attempt": 1, "key": "k", "run_id": run.id}
        session.add(tables.Reward(**key, source="endpoint", name="reward", value=-2.0))
    await scene.attempt(given, kind="succeeded", reward=None)
    await scene.attempt(silent, kind="succeeded", reward=None)
    await scene.tick()
    assert (await _rewards(scene, run))[2:] == [("succeeded", 0.0), ("no_reward", -2.0)]
    assert not await _broken(scene, run)


async def test_what_was_given_to_a_failure_lifts_it_above_no_sibling(scene: Scene) -> None:
    run = await add_run(scene, config=document(groups_per_step=1, max_policy_lag=0, group_size=3))
    await scene.tick(2)
    worked, praised, blamed = await scene.rollouts(run)
    async with scene.database.session() as session:
        for rollout, value in ((praised, 0.3), (blamed, -0.3)):
            key = {"rollout_id": rollout.id, "attempt": 1, "key": "k", "run_id": run.id}
            session.add(tables.Reward(**key, source="endpoint", name="reward", value=value))
    await scene.attempt(worked, kind="succeeded", reward=-1.0)
    for rollout in (praised, blamed):
        await scene.attempt(rollout, kind="agent_error", reward=None)
    await scene.tick()
    # With what was given: -1 and -1.3.
    assert await _rewards(scene, run) == [("succeeded", -1.0), ("agent_error", -1.3), ("agent_error", -1.0)]
    assert not await _broken(scene, run)
    async with scene.database.session() as session:
        await session.execute(update(tables.Rollout).where(tables.Rollout.id == praised.id).values(reward=-1.0))
    assert await _broken(scene, run)


async def test_a_new_leader_rewards_the_failures_of_groups_that_an_earlier_version_completed(scene: Scene) -> None:
    run = await add_run(scene, config=document(groups_per_step=1, max_policy_lag=0))
    await scene.tick(2)
    for rollout, kind in zip(await scene.rollouts(run), ("succeeded", "agent_error"), strict=True):
        await scene.attempt(rollout, kind=kind, reward=-1.0 if kind == "succeeded" else None)
    await scene.tick()
    async with scene.database.session() as session:
        await session.execute(update(tables.Rollout).where(tables.Rollout.reason == "agent_error").values(reward=None))
    assert await _broken(scene, run)
    await take_over(scene.settings, scene.database)
    assert await _rewards(scene, run) == [("succeeded", -1.0), ("agent_error", -1.0)]
    assert not await _broken(scene, run)


async def test_a_number_for_failures_above_other_rewards_is_a_warning(scene: Scene) -> None:
    run = await add_run(scene, config=document(groups_per_step=1, max_policy_lag=0, failure_reward=0.0))
    await scene.tick(2)
    for rollout, kind in zip(await scene.rollouts(run), ("succeeded", "agent_error"), strict=True):
        await scene.attempt(rollout, kind=kind, reward=-1.0 if kind == "succeeded" else None)
    await scene.tick()
    assert await _rewards(scene, run) == [("succeeded", -1.0), ("agent_error", 0.0)]
    assert await alarm_lines(scene.database, run.id) == [
        "sampling.failure_reward 0 is above the smallest reward of the run so far (-1), so that crashes are worth"
        " learning: cancel the run and continue it with null (the smallest so far, at most 0), or at most -1"
    ]


async def _broken(scene: Scene, run: tables.Run) -> list[Any]:
    found = await asyncio.to_thread(violations, scene.database.dsn, run.id)
    return [rows for words, rows in found.items() if words.startswith(("failures", "finished rollouts"))]


async def test_evaluations_measure_failures_of_all_versions_by_one_number(scene: Scene) -> None:
    run = await builders.add_run(scene.database)
    for number, earned in ((1, 0.0), (2, -5.0)):
        _, trained = await builders.add_group(scene.database, run, number)
        for rollout in trained:
            await builders.finish_rollout(scene.database, rollout, reward=earned)
        evaluation = ids.evaluation_id(run.id, number)
        async with scene.database.session() as session:
            columns = {"dataset_id": run.dataset_id, "policy_version": number, "rollouts_per_task": 2, "max_tasks": 1}
            session.add(tables.Evaluation(id=evaluation, run_id=run.id, number=number, **columns))
        _, [solved, crashed] = await builders.add_group(scene.database, run, 0, evaluation_id=evaluation)
        await builders.finish_rollout(scene.database, solved, reward=1.0)
        await builders.finish_rollout(scene.database, crashed, reward=None, kind="agent_error")
        async with scene.database.session() as session:
            # A reward on the way to a crash lifts it above no other failure.
            session.add(tables.ExternalReward(rollout_id=crashed.id, key="k", name="reward", value=0.3))
            await complete_groups(session)
        async with scene.database.read() as session:
            page = await list_evaluations(session, run.id, cursor=None, limit=9)
        means = [one.results.reward.mean for one in page.items if one.results.reward is not None]
        # The crash is worth 0 in the first, and -5 in both once the run has earned that.
        assert means == [(1.0 + earned) / 2] * number
    assert not await _broken(scene, run)
