"""The API through the typed client shows rollouts that wait for grades, and the platform's work and services."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from sqlalchemy import text

from leyden.libs.client import Client, NotFound
from leyden.libs.contracts.api.waiting import NEEDED_DISK_BYTES
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from tests.fakes.served_api import TOKEN
from tests.support import builders


@pytest.fixture
def leyden(api_url: str) -> Iterator[Client]:
    with Client(api_url, TOKEN, patience_seconds=0.0) as client:
        yield client


async def run_that_waits(
    database: Database, *, values: int = 1, seconds: float = 3600.0, output: str = "4", size: int = 2, **more: object
) -> tuple[tables.Run, list[tables.Rollout]]:
    """A run whose rollouts have ended and wait for values of `thumbs`, in the order of their siblings."""
    reward = {
        "components": [{"name": "thumbs", "from": "feedback"}],
        "wait": {"seconds": seconds, "values": values},
    }
    run = await builders.add_run(database, config=builders.run_document(name="support", reward={**reward, **more}))
    _, rollouts = await builders.add_group(database, run, size=size)
    for rollout in rollouts:
        await builders.add_attempt(database, rollout, state="settled", finished_at=datetime.now(tz=UTC))
        await builders.add_outcome(database, rollout, reward=None, stdout_tail=output)
        async with database.session() as session:
            (await session.get_one(tables.Rollout, rollout.id)).grading_attempt = 1
    return run, rollouts


async def test_rollouts_wait_with_task_and_output_until_their_values_have_come(
    leyden: Client, database: Database
) -> None:
    run, rollouts = await run_that_waits(database, values=2, output="x" * 30_000 + "end")
    await run_that_waits(database, seconds=0.0)

    async def waiting(run_id: str | None = None) -> list[tuple[str, list[tuple[str, int, int]]]]:
        found = await asyncio.to_thread(lambda: list(leyden.waiting(run_id)))
        return [(one.rollout_id, [(of.component, of.given, of.needed) for of in one.missing]) for one in found]

    missing = [("thumbs", 0, 2)]
    assert await waiting() == [(one.id, missing) for one in rollouts]
    [first, _] = await asyncio.to_thread(lambda: list(leyden.waiting(run.id)))
    assert (first.run_name, first.attempt, first.task_number) == ("support", 1, 0)
    assert (first.task, len(first.output), first.output[-4:]) == ('{"question": "2+2"}', 20_000, "xend")
    assert (first.due_at - first.since).total_seconds() == 3600.0
    await asyncio.to_thread(leyden.rate, rollouts[0].id, "thumbs", 1.0)
    assert await waiting(run.id) == [(rollouts[0].id, [("thumbs", 1, 2)]), (rollouts[1].id, missing)]
    await asyncio.to_thread(leyden.rate, rollouts[0].id, "thumbs", 0.0)
    assert await waiting(run.id) == [(rollouts[1].id, missing)]
    with pytest.raises(NotFound):
        await waiting("nobody")


async def test_the_list_has_pages_and_a_total(api_http: httpx.AsyncClient, database: Database) -> None:
    _, rollouts = await run_that_waits(database, size=3)
    found, cursor = list[str](), None
    for page in range(3):
        words = {"limit": 1, **({"cursor": cursor} if cursor else {})}
        answer = (await api_http.get("/v1/feedback", params=words)).json()
        assert answer["total"] == (3 if page == 0 else None)
        found += [one["rollout_id"] for one in answer["items"]]
        cursor = answer["next_cursor"]
    assert (found, cursor) == ([one.id for one in rollouts], None)


async def test_the_platform_tells_work_bytes_and_which_services_are_connected(
    leyden: Client, database: Database, postgres_dsn: str
) -> None:
    run, _ = await run_that_waits(database)
    await run_that_waits(database, seconds=0.0, size=3)
    for version, columns in enumerate(({"size_bytes": 7}, {"size_bytes": 5, "pruned_at": run.created_at})):
        await builders.add_policy_version(database, run, version, **columns)
    grader = Database(postgres_dsn, "leyden-grader", pool_size=1)
    try:
        async with grader.read() as session:
            await session.get(tables.Run, run.id)
        found = await asyncio.to_thread(leyden.platform)
    finally:
        await grader.close()
    assert (found.waiting_feedback, found.waiting_grades) == (2, 3)
    assert (found.queued_rollouts, found.live_attempts, found.weights_bytes) == (0, 0, 7)
    assert found.database_bytes > 2**20
    connected = {one.name: one.active_at is not None for one in found.services if one.connections > 0}
    assert connected == {"api": True, "grader": True}
    assert {one.name for one in found.services} >= {"gateway", "controller", "runner", "trainer"}


async def data_folder(database: Database) -> str:
    async with database.read() as session:
        return str(await session.scalar(text("SHOW data_directory")))


async def test_the_platform_tells_free_disk_where_the_api_has_the_folder(
    leyden: Client, database: Database, tmp_path: Path
) -> None:
    run, _ = await run_that_waits(database)
    await builders.add_policy_version(database, run, 0, path=str(tmp_path))
    versions, postgres = (await asyncio.to_thread(leyden.platform)).volumes
    assert (versions.free_bytes, versions.nearly_full, "no run has trained" in (versions.reason or "")) == (
        None,
        None,
        True,
    )
    # The folder itself is for administrators.
    assert postgres.path is None and postgres.total_bytes == shutil.disk_usage(await data_folder(database)).total
    await builders.add_policy_version(database, run, 1, path=str(tmp_path))
    [versions, postgres] = (await asyncio.to_thread(leyden.platform)).volumes
    is_same = tmp_path.stat().st_dev == Path(await data_folder(database)).stat().st_dev
    assert postgres.same_disk_as == ("versions" if is_same else None)
    assert versions.free_bytes is not None and 0 < versions.free_bytes <= (versions.total_bytes or 0)
    assert versions.nearly_full == (versions.free_bytes < NEEDED_DISK_BYTES)
    await builders.add_policy_version(database, run, 2, path=str(tmp_path / "gone"))
    [versions, _] = (await asyncio.to_thread(leyden.platform)).volumes
    assert (versions.free_bytes, versions.reason) == (None, f"the API's machine has no folder {tmp_path / 'gone'}")
