from __future__ import annotations

import asyncio

import pytest

from leyden.libs.contracts.api import EvaluationRequest
from leyden.libs.store import runs, training
from leyden.libs.store.database import Database
from tests import builders


async def prune(database: Database, run_id: str, before: int) -> set[int]:
    async with database.session() as session:
        return await training.prune_versions(session, run_id, before)


async def test_a_version_with_a_pending_evaluation_is_not_removed(database: Database) -> None:
    run = await builders.add_run(database)
    for version in range(4):
        await builders.add_policy_version(database, run, version)
    async with database.session() as session:
        await runs.create_evaluation(session, run.id, EvaluationRequest(policy_version=1, dataset=run.dataset_id))
        pruning = asyncio.create_task(prune(database, run.id, 3))
        # It waits for the evaluation, whose transaction is still open.
        assert not (await asyncio.wait({pruning}, timeout=0.5))[0]
    assert await pruning == {0, 1, 3}


async def test_a_version_that_is_being_removed_cannot_be_evaluated(database: Database) -> None:
    run = await builders.add_run(database)
    for version in range(4):
        await builders.add_policy_version(database, run, version)

    async def evaluate() -> str:
        async with database.session() as session:
            return await runs.create_evaluation(
                session, run.id, EvaluationRequest(policy_version=1, dataset=run.dataset_id)
            )

    async with database.session() as session:
        assert await training.prune_versions(session, run.id, 3) == {0, 3}
        asking = asyncio.create_task(evaluate())
        assert not (await asyncio.wait({asking}, timeout=0.5))[0]
    with pytest.raises(runs.ActionRefused, match="no weights of version 1"):
        await asking
