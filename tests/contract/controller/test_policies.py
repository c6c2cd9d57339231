"""Runs with several policies: all their pools or none, one phase, one line of groups."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from leyden.libs.contracts.api.runs import EvaluationRequest
from leyden.libs.contracts.config import RunConfig
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.read.runs import UnknownRun
from leyden.libs.store.runs import actions
from tests.contract.controller.test_store import LONG_AGO, ObedientFleet, Scene, document
from tests.support import builders

PAIR = {
    "roles": [{"name": "writer", "agent_name": "writer"}, {"name": "checker", "policy": "checker"}],
    "policies": {"checker": {"pool": "second"}},
}


@pytest.fixture
async def scene(database: Database, redis_url: str) -> AsyncIterator[Scene]:
    made = Scene(database, redis_url)
    made.fleets["second"] = ObedientFleet()
    await builders.add_dataset(database, [{"question": str(number)} for number in range(4)])
    yield made
    await made.close()


async def create(scene: Scene, **changes: Any) -> tuple[tables.Run, tables.Run]:
    """A run with version 0 of both policies, and the row of its other policy."""
    config = RunConfig.model_validate({**document(), **PAIR, **changes})
    async with scene.database.session() as session:
        made = await actions.create_run(session, config)
        rows = [await session.get_one(tables.Run, one) for one in (made.id, made.policies["checker"].id)]
    for row in rows:
        await builders.add_policy_version(scene.database, row, 0)
    return rows[0], rows[1]


async def with_lead_ahead(scene: Scene, **changes: Any) -> tuple[tables.Run, tables.Run]:
    """As `create`, with a first step that the run's own model has made and the other policy has not."""
    lead, checker = await create(scene, **changes)
    await scene.tick(2)
    await scene.finish_all(lead)
    await scene.tick()
    await scene.credit_and_train(lead, 1)
    return lead, checker


async def test_policies_wait_for_all_their_pools_and_learn_from_the_same_groups(scene: Scene) -> None:
    async with scene.database.session() as session:
        alone = await actions.create_run(session, RunConfig.model_validate({**document(), "pool": "second"}))
    first = await row(scene, alone.id)
    await builders.add_policy_version(scene.database, first, 0)
    lead, checker = await create(scene)
    await scene.tick(2)
    waiting = (
        f"waiting for an engine of pool second: {first.id} has them; its 2 policies begin at the same time, so that"
        " later runs may begin before"
    )
    assert [await scene.phase(run) for run in (first, lead, checker)] == [
        ("running", None),
        ("pending", waiting),
        ("pending", waiting),
    ]
    assert scene.trainers.wanted == {first.id: 0}
    await scene.intend(first, "cancelled")
    await scene.tick(3)
    assert [await scene.phase(run) for run in (lead, checker)] == [("running", None)] * 2
    assert scene.trainers.wanted == {lead.id: 0, checker.id: 0}
    assert [fleet.served and fleet.served.run_id for fleet in scene.fleets.values()] == [lead.id, checker.id]
    assert [len(await scene.groups(run)) for run in (lead, checker)] == [4, 0]


async def test_a_run_that_waits_for_one_pool_leaves_another_to_later_runs(scene: Scene) -> None:
    async def alone(pool: str) -> tables.Run:
        async with scene.database.session() as session:
            made = await actions.create_run(session, RunConfig.model_validate({**document(), "pool": pool}))
        await builders.add_policy_version(scene.database, await row(scene, made.id), 0)
        return await row(scene, made.id)

    first = await alone("second")
    lead, _ = await create(scene)
    later = await alone("default")
    await scene.tick(2)
    assert [(await scene.phase(run))[0] for run in (first, lead, later)] == ["running", "pending", "running"]
    await scene.intend(first, "cancelled")
    await scene.tick(2)
    assert (await scene.phase(lead))[1].startswith(f"waiting for an engine of pool default: {later.id} has them")
    await scene.intend(later, "cancelled")
    await scene.tick(2)
    assert await scene.phase(lead) == ("running", None)


async def test_the_slower_policy_bounds_the_groups_and_both_must_end(scene: Scene) -> None:
    lead, checker = await with_lead_ahead(scene)
    await scene.tick(2)
    assert len(await scene.groups(lead)) == 4
    await credit_and_train(scene, lead, checker, 1)
    await scene.tick(2)
    assert [fleet.served and fleet.served.version for fleet in scene.fleets.values()] == [1, 1]
    await scene.credit_and_train(lead, 2)
    await scene.tick(2)
    assert await scene.phase(lead) == ("running", None)
    assert scene.trainers.wanted == {checker.id: 1}
    await credit_and_train(scene, lead, checker, 2)
    await scene.tick(2)
    assert [await scene.phase(run) for run in (lead, checker)] == [("completed", None)] * 2
    assert scene.trainers.wanted == {}


async def test_an_evaluation_of_an_old_version_asks_that_version_of_each_policy(scene: Scene) -> None:
    lead, checker = await create(scene)
    for version in (1, 2, 3):
        for policy in (lead, checker):
            await builders.add_policy_version(scene.database, policy, version)
    async with scene.database.session() as session:
        await actions.create_evaluation(session, lead.id, EvaluationRequest(policy_version=1, dataset=lead.dataset_id))
    await scene.tick(3)
    assert await scene.phase(lead) == ("evaluating", None)
    assert [fleet.served and fleet.served.version for fleet in scene.fleets.values()] == [1, 1]


async def test_an_evaluation_waits_until_each_policy_has_its_version(scene: Scene) -> None:
    held_out = {"dataset": document()["dataset"], "every": 1, "at_start": False}
    lead, checker = await with_lead_ahead(scene, evaluation=held_out)
    await scene.tick(2)
    assert await scene.phase(lead) == ("running", None)
    assert [group.evaluation_id for group in await scene.groups(lead)] == [None] * 4
    await credit_and_train(scene, lead, checker, 1)
    await scene.tick(3)
    assert await scene.phase(lead) == ("evaluating", None)
    assert [fleet.served and fleet.served.version for fleet in scene.fleets.values()] == [1, 1]
    measured = [group.admitted_version for group in await scene.groups(lead) if group.evaluation_id is not None]
    assert measured == [1] * 4


async def test_the_task_of_a_group_that_one_policy_refused_as_stale_is_sampled_again(scene: Scene) -> None:
    lead, checker = await with_lead_ahead(scene)
    first = (await scene.groups(lead))[0]
    async with scene.database.session() as session:
        session.add(tables.StepGroup(group_id=first.id, run_id=checker.id, step=None, verdict="stale"))
    await scene.tick()
    again = (await scene.groups(lead))[4:]
    assert [(one.replaces, one.task_number) for one in again] == [(first.id, first.task_number)]


async def test_a_frozen_policy_bounds_nothing(scene: Scene) -> None:
    lead, checker = await create(scene, policies={"checker": {"pool": "second", "frozen": True}})
    await scene.tick(2)
    assert scene.trainers.wanted == {lead.id: 0}
    await scene.finish_all(lead)
    await scene.tick()
    for step in (1, 2):
        await scene.credit_and_train(lead, step)
        await scene.tick(2)
    assert [await scene.phase(run) for run in (lead, checker)] == [("completed", None)] * 2


async def test_a_policy_whose_trainer_fails_fails_the_run(scene: Scene) -> None:
    lead, checker = await create(scene)
    await scene.tick(2)
    scene.trainers.failures = {checker.id: "the trainer ended 5 times"}
    await scene.tick(2)
    assert await scene.phase(lead) == ("failed", "policy checker: the trainer ended 5 times")
    assert await scene.phase(checker) == ("failed", "the trainer ended 5 times")
    other, its_checker = await create(scene)
    await scene.tick(2)
    scene.trainers.failures = {other.id: "the trainer ended 5 times"}
    await scene.tick(2)
    assert await scene.phase(its_checker) == ("failed", f"run {other.id} failed")


async def test_steering_a_run_steers_its_policies(scene: Scene) -> None:
    lead, checker = await create(scene)
    await scene.tick(2)
    for action, phase in (("pause", "paused"), ("resume", "running"), ("cancel", "cancelled")):
        async with scene.database.session() as session:
            await actions.change_intent(session, lead.id, action)
        await scene.tick(2)
        assert [(await scene.phase(run))[0] for run in (lead, checker)] == [phase] * 2
    async with scene.database.session() as session:
        with pytest.raises(UnknownRun, match=f"is policy 'checker' of run {lead.id}: name that run"):
            await actions.change_intent(session, checker.id, "pause")


async def row(scene: Scene, run_id: str) -> tables.Run:
    async with scene.database.read() as session:
        return await session.get_one(tables.Run, run_id)


async def credit_and_train(scene: Scene, lead: tables.Run, run: tables.Run, step: int) -> None:
    """A step of another policy on the groups of the lead."""
    groups = (await scene.groups(lead))[2 * step - 2 : 2 * step]
    async with scene.database.session() as session:
        session.add(tables.Step(run_id=run.id, number=step, metrics={}, checkpoint="c", started_at=LONG_AGO))
        for group in groups:
            session.add(tables.StepGroup(group_id=group.id, run_id=run.id, step=step, verdict="trained"))
    await builders.add_policy_version(scene.database, run, step)
