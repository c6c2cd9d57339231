import pytest
from sqlalchemy import func, select

from leyden.libs.store import tables
from leyden.libs.store.database import Database
from tests.support import builders


async def test_every_builder_writes_its_row(database: Database) -> None:
    run = await builders.add_run(database)
    group, rollouts = await builders.add_group(database, run)
    await builders.add_call(database, rollouts[0])
    await builders.add_tool_span(database, rollouts[0], "memory")
    await builders.finish_rollout(database, rollouts[0])
    await builders.add_credited_group(database, group)
    await builders.add_sample(database, rollouts[0])
    await builders.add_policy_version(database, run, 0)
    async with database.read() as session:
        counts = {
            table.__tablename__: await session.scalar(select(func.count()).select_from(table))
            for table in (tables.ModelCall, tables.Span, tables.Outcome, tables.Sample, tables.PolicyVersion)
        }
        rollout = await session.get_one(tables.Rollout, rollouts[0].id)
    assert counts == {"model_calls": 1, "spans": 1, "outcomes": 1, "samples": 1, "policy_versions": 1}
    assert (rollout.state, rollout.reward, rollout.attempt) == ("finished", 1.0, 1)


@pytest.mark.parametrize("position", [1, 2])
async def test_databases_of_two_tests_never_meet(database: Database, position: int) -> None:
    await builders.add_dataset(database)
    async with database.read() as session:
        assert await session.scalar(select(func.count()).select_from(tables.Dataset)) == 1


async def test_redis_is_empty(redis_url: str) -> None:
    assert redis_url.startswith("redis://")
