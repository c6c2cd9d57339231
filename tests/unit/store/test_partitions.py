from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import text

from leyden.libs.store.database import Database, Refused, Session
from leyden.libs.store.runs.partitions import create_run_partitions
from leyden.libs.store.tables import PARTITIONED
from tests.support import builders


async def partitions(session: Session) -> int | None:
    return await session.scalar(
        text("SELECT count(*) FROM pg_inherits JOIN pg_class c ON c.oid = inhrelid WHERE c.relkind = 'r'")
    )


async def test_creating_partitions_again_changes_nothing(database: Database) -> None:
    run = await builders.add_run(database)
    async with database.session() as session:
        await create_run_partitions(session, run.id)
        assert await partitions(session) == len(PARTITIONED)


async def test_two_callers_at_once_make_one_set(database: Database) -> None:
    async def create() -> None:
        async with database.session() as session:
            await create_run_partitions(session, "run-new")

    await asyncio.gather(*(create() for _ in range(4)))
    async with database.session() as session:
        assert await partitions(session) == len(PARTITIONED)


async def layout(database: Database, place: str) -> dict[str, tuple[str, str]]:
    """How each column of a table or partition is stored and compressed."""
    query = text("""
        SELECT attname, attstorage, attcompression FROM pg_attribute
        WHERE attrelid = CAST(:place AS regclass) AND attnum > 0
    """)
    async with database.read() as session:
        return {
            name: (storage, compression)
            for name, storage, compression in await session.execute(query, {"place": place})
        }


async def test_partitions_store_every_column_as_their_table_does(database: Database) -> None:
    run = await builders.add_run(database)
    for table in (one.__tablename__ for one in PARTITIONED):
        assert await layout(database, f'"{table}__{run.id}"') == await layout(database, table)
    calls = await layout(database, "model_calls")
    # Kept outside of the row and not compressed: token ids do not become much smaller, and cost their time.
    assert calls["prompt_ids"] == calls["sampled_ids"] == calls["generator_logprobs"] == ("e", "")


async def test_the_guards_and_keys_of_the_table_hold_in_its_partitions(database: Database) -> None:
    run = await builders.add_run(database)
    _, rollouts = await builders.add_group(database, run)
    call = await builders.add_call(database, rollouts[0])
    with pytest.raises(Refused, match="append-only"):
        async with database.session() as session:
            await session.execute(text(f'DELETE FROM "model_calls__{run.id}"'))
    with pytest.raises(Refused, match="pkey"):
        await builders.add_call(database, rollouts[0], id=call.id)
    with pytest.raises(Refused, match="status_known"):
        await builders.add_call(database, rollouts[0], status="lost")


async def test_a_run_without_partitions_is_refused_and_not_lost_silently(database: Database) -> None:
    run = await builders.add_run(database)
    _, rollouts = await builders.add_group(database, run)
    with pytest.raises(Refused, match="no partition of relation"):
        await builders.add_call(database, rollouts[0], run_id="run-unknown")


async def test_creating_partitions_does_not_wait_for_writers_of_other_runs(database: Database) -> None:
    run = await builders.add_run(database)
    _, rollouts = await builders.add_group(database, run)
    async with database.session() as creating:
        await create_run_partitions(creating, "run-new")
        # The partitions' transaction is still open.
        await asyncio.wait_for(builders.add_call(database, rollouts[0]), timeout=60)
