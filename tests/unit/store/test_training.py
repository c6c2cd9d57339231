from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from leyden.libs.contracts.api.runs import EvaluationRequest
from leyden.libs.contracts.config import CPU, Computation, Device, RunConfig
from leyden.libs.store import tables, training
from leyden.libs.store.database import Database
from leyden.libs.store.policies import policy_columns
from leyden.libs.store.read.best import best_version
from leyden.libs.store.runs import actions
from tests.support import builders


async def prune(database: Database, run_id: str, before: int) -> set[int]:
    async with database.session() as session:
        return (await training.prune_versions(session, run_id, before)).versions


async def add_pair(database: Database, *, is_policy: bool) -> tuple[tables.Run, tables.Run]:
    """A run with versions 0 to 3, and the run whose versions a test removes: the same, or one that carries its policy
    and has the same versions."""
    lead = pruned = await builders.add_run(database)
    if is_policy:
        pruned = await builders.add_run(database, **policy_columns(lead.id, "checker"))
    for run in {lead.id: lead, pruned.id: pruned}.values():
        for version in range(4):
            await builders.add_policy_version(database, run, version)
    return lead, pruned


@pytest.mark.parametrize("is_policy", [False, True])
async def test_a_version_with_a_pending_evaluation_is_not_removed(database: Database, is_policy: bool) -> None:
    run, pruned = await add_pair(database, is_policy=is_policy)
    async with database.session() as session:
        await actions.create_evaluation(session, run.id, EvaluationRequest(policy_version=1, dataset=run.dataset_id))
        pruning = asyncio.create_task(prune(database, pruned.id, 3))
        # It waits for the evaluation, whose transaction is still open.
        assert not (await asyncio.wait({pruning}, timeout=0.5))[0]
    assert await pruning == {0, 1, 3}


async def add_rewards(database: Database, run: tables.Run, version: int, reward: float, **columns: Any) -> None:
    async with database.session() as session:
        if "evaluation_id" in columns:
            await session.merge(
                tables.Evaluation(
                    id=columns["evaluation_id"],
                    run_id=run.id,
                    number=1,
                    dataset_id=run.dataset_id,
                    rollouts_per_task=1,
                    max_tasks=1,
                )
            )
    _, rollouts = await builders.add_group(
        database, run, version, admitted_version=version, state="complete", **columns
    )
    for rollout in rollouts:
        await builders.finish_rollout(database, rollout, reward=reward)


async def test_the_version_that_earned_most_is_not_removed(database: Database) -> None:
    run = await builders.add_run(database)
    for version in range(6):
        await builders.add_policy_version(database, run, version)
    assert await prune(database, run.id, 2) == {0, 2, 3, 4, 5}
    for version, reward in ((0, 1.0), (2, 0.5), (3, 0.9), (4, 0.8)):
        await add_rewards(database, run, version, reward)
    async with database.read() as session:
        assert (await best_version(session, run.id)).version == 3
    assert await prune(database, run.id, 5) == {0, 3, 5}
    # Evaluations count before training.
    await add_rewards(database, run, 5, 0.1, evaluation_id=f"{run.id}.e1")
    assert await prune(database, run.id, 5) == {0, 5}


async def test_a_version_that_is_being_removed_cannot_be_evaluated(database: Database) -> None:
    run = await builders.add_run(database)
    for version in range(4):
        await builders.add_policy_version(database, run, version)

    async def evaluate() -> str:
        async with database.session() as session:
            return await actions.create_evaluation(
                session, run.id, EvaluationRequest(policy_version=1, dataset=run.dataset_id)
            )

    async with database.session() as session:
        assert (await training.prune_versions(session, run.id, 3)).versions == {0, 3}
        asking = asyncio.create_task(evaluate())
        assert not (await asyncio.wait({asking}, timeout=0.5))[0]
    with pytest.raises(actions.ActionRefused, match="no weights of version 1"):
        await asking


async def test_a_part_of_an_evaluation_or_other_tasks_decide_no_best_version(database: Database) -> None:
    run = await builders.add_run(database)
    other = await builders.add_dataset(database, name="other", task_count=1)
    for version in range(4):
        await builders.add_policy_version(database, run, version)
    versions = {1: (1, run.dataset_id, 2), 2: (2, run.dataset_id, 1), 3: (3, other.id, 1)}
    async with database.session() as session:
        session.add_all(
            tables.Evaluation(
                id=f"{run.id}.e{number}",
                run_id=run.id,
                number=number,
                dataset_id=dataset,
                policy_version=version,
                rollouts_per_task=1,
                max_tasks=1 if number > 2 else 2,
            )
            for number, (version, dataset, _) in versions.items()
        )
    for number, (version, _, groups) in versions.items():
        for group in range(groups):
            _, rollouts = await builders.add_group(
                database,
                run,
                group,
                size=1,
                evaluation_id=f"{run.id}.e{number}",
                admitted_version=version,
                state="complete",
            )
            await builders.finish_rollout(database, rollouts[0], reward=float(number))
    async with database.read() as session:
        # Evaluation 2 has measured one of two tasks, and evaluation 3 other tasks.
        assert (await best_version(session, run.id)).version == 1
    # The version of the unfinished evaluation stays, and the best; a finished evaluation's does not.
    assert await prune(database, run.id, 4) == {0, 1, 2}


async def team(database: Database) -> tuple[tables.Run, tables.Run]:
    """A leading run and the one of its checker, with versions 0 to 5 each."""
    lead = await builders.add_run(database)
    checker = await builders.add_run(database, dataset_id=lead.dataset_id, **policy_columns(lead.id, "checker"))
    for run in (lead, checker):
        for version in range(6):
            await builders.add_policy_version(database, run, version)
    return lead, checker


async def best(database: Database, run: tables.Run) -> int | None:
    async with database.read() as session:
        return (await best_version(session, run.id)).version


async def test_a_policy_has_the_best_version_of_the_leading_run_while_it_has_its_files(database: Database) -> None:
    lead, checker = await team(database)
    assert await best(database, checker) is None
    for version, reward in ((2, 0.9), (3, 0.5)):
        await add_rewards(database, lead, version, reward)
    assert [await best(database, run) for run in (lead, checker)] == [2, 2]
    assert await prune(database, checker.id, 5) == {0, 2, 5}
    await add_rewards(database, lead, 4, 1.0)
    # The checker has removed its version 4, though the leading run has not.
    assert [await best(database, run) for run in (lead, checker)] == [4, None]


async def test_a_policys_version_with_a_pending_evaluation_of_its_leading_run_is_not_removed(
    database: Database,
) -> None:
    lead, checker = await team(database)
    async with database.session() as session:
        await actions.create_evaluation(session, lead.id, EvaluationRequest(policy_version=1, dataset=lead.dataset_id))
        pruning = asyncio.create_task(prune(database, checker.id, 3))
        # It waits for the evaluation, whose transaction is still open.
        assert not (await asyncio.wait({pruning}, timeout=0.5))[0]
    assert await pruning == {0, 1, 3, 4, 5}


async def test_a_version_that_a_continued_run_still_needs_is_not_removed(database: Database) -> None:
    lead, checker = await team(database)
    for parent in (lead, checker):
        child = await builders.add_run(database, dataset_id=lead.dataset_id, parent_run_id=parent.id, parent_version=2)
        assert await prune(database, parent.id, 4) == {0, 2, 4, 5}
        await builders.add_policy_version(database, child, 0)
        assert await prune(database, parent.id, 4) == {0, 2, 4, 5}
        # Its own first checkpoint is whole before its second step.
        async with database.session() as session:
            at = datetime.now(tz=UTC)
            session.add(
                tables.Step(run_id=child.id, number=2, metrics={}, checkpoint="c", started_at=at, created_at=at)
            )
        assert await prune(database, parent.id, 4) == {0, 4, 5}


@pytest.mark.parametrize("ended", ["by its user", "by a failure"])
async def test_a_continued_run_that_ended_before_it_copied_a_version_does_not_keep_it(
    database: Database, ended: str
) -> None:
    parent, _ = await team(database)
    child = await builders.add_run(database, dataset_id=parent.dataset_id, parent_run_id=parent.id, parent_version=2)
    assert await prune(database, parent.id, 4) == {0, 2, 4, 5}
    if ended == "by its user":
        async with database.session() as session:
            await actions.change_intent(session, child.id, "cancel")
    else:
        await builders.end_run(database, child, "failed")
    assert await prune(database, parent.id, 4) == {0, 4, 5}


async def test_a_run_keeps_what_its_first_trainer_resolved(database: Database) -> None:
    run = await builders.add_run(database)
    config = RunConfig.stored(run.config)

    async def opened(device: Device) -> Computation:
        async with database.session() as session:
            return await training.keep_computation(session, run.id, config.computation(device))

    async with database.read() as session:
        assert await training.read_computation(session, run.id) is None
    first = await opened(CPU)
    assert first == config.computation(CPU)
    assert await opened(Device("cuda", flex=True)) == first.model_copy(update={"moved_to": "cuda"})
    assert await opened(CPU) == first
    async with database.read() as session:
        assert await training.read_computation(session, run.id) == first
