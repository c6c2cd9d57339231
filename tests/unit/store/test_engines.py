from __future__ import annotations

from sqlalchemy import text

from leyden.libs.store.database import Database
from leyden.libs.store.engines import Assignment, Pool, write_assignments, write_pools

_RUNS = text("SELECT run_id, run_ids, waiting FROM pools WHERE name = 'shared'")


async def assign(database: Database, *run_ids: str, waiting: tuple[str, ...] = ()) -> tuple[object, ...]:
    async with database.session() as session:
        await write_assignments(session, {"shared": Assignment(run_ids, waiting)})
    async with database.read() as session:
        return tuple((await session.execute(_RUNS)).one())


async def test_the_version_before_reads_the_first_run_of_a_pool(database: Database) -> None:
    async with database.session() as session:
        await write_pools(session, [Pool("shared", adapters=2)])
    assert await assign(database, "a", "b", waiting=("c",)) == ("a", ["a", "b"], ["c"])
    async with database.session() as session:
        # A controller of the version before, during an upgrade or after a rollback.
        await session.execute(text("UPDATE pools SET run_id = 'c', waiting = '{}' WHERE name = 'shared'"))
    assert await assign(database, "a", "b", waiting=("c",)) == ("a", ["a", "b"], ["c"])
    async with database.session() as session:
        await session.execute(text("UPDATE pools SET run_id = 'c' WHERE name = 'shared'"))
    assert await assign(database, "a", "b", waiting=("c",)) == ("a", ["a", "b"], ["c"])
    assert await assign(database) == (None, [], [])
