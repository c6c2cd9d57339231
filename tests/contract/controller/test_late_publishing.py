"""Versions that the object store did not get before the end of their run: the run says so, the controller publishes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from leyden.libs.faults import FaultInjector
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.locks import AdvisoryLock
from leyden.libs.weights import NotPublished, VersionKey, WeightStore
from leyden.services.controller.settings import Settings
from leyden.services.controller.upkeep.publishing import publish_late
from tests.contract.trainer.test_publishing import published, retained
from tests.contract.trainer.test_steps import Case, flip_a_bit, until_rows
from tests.contract.weights.conftest import files_in
from tests.support import builders
from tests.support.alarms import alarm_lines, alarms
from tests.support.object_store import STORE

AWAY = "http://127.0.0.1:9"
PUBLISHING = """
import asyncio, sys
from leyden.libs.store.database import Database
from leyden.services.controller.settings import Settings
from leyden.services.controller.upkeep.publishing import publish_late

async def main():
    settings = Settings()
    database = Database(settings.database_url, "tests")
    await publish_late(settings, database, set())
    await database.close()

asyncio.run(main())
"""


@pytest.fixture
def settings(bucket: dict[str, str], database: Database) -> Settings:
    return Settings(database_url=database.dsn)


@pytest.fixture
async def ended(
    bucket: dict[str, str],
    database: Database,
    postgres_dsn: str,
    tiny_model: Path,
    tmp_path: Path,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Case:
    """A run of two steps that completed; the store went away before the last one."""
    case = await Case(database, postgres_dsn, tiny_model, tmp_path / "runs", redis_url).open(
        steps=2, keep_checkpoints=2
    )
    for number in range(2):
        await case.add_group(number)
    stop = asyncio.Event()
    first = asyncio.create_task(case.train(stop))
    await until_rows(case, tables.Step, 1)
    stop.set()
    await first
    for number in range(2, 4):
        await case.add_group(number, version=1)
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", AWAY)
        await case.train()
    await builders.end_run(database, case.run)
    return case


async def test_a_run_whose_store_went_away_before_its_end_says_so_until_the_controller_has_published(
    ended: Case, settings: Settings, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [row.metrics["publication_failed"] for row in await ended.rows(tables.Step)] == [0.0, 1.0]  # type: ignore[attr-defined]
    assert [key.version for key in await published(ended)] == [1]
    # Its end is not judged yet.
    await publish_late(settings, database, set())
    assert [key.version for key in await published(ended)] == [1]
    [said] = await alarm_lines(database, ended.run.id)
    assert said.startswith("at step 2 the object store did not get version 2 or one before it: mend the cause")
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", AWAY)
        await publish_late(settings, database, set())
    assert await alarm_lines(database, ended.run.id) == [said]
    await publish_late(settings, database, set())
    assert await published(ended) == await retained(ended)
    assert [row.ended_at is not None for row in await ended.rows(tables.Alarm)] == [True]  # type: ignore[attr-defined]
    key = max(await published(ended))
    await asyncio.to_thread(WeightStore(STORE).fetch, key, tmp_path / "got")
    assert files_in(tmp_path / "got") == files_in(Path((await ended.versions())[2].path))


async def test_a_controller_killed_while_it_publishes_leaves_no_half_and_the_next_one_publishes_all(
    ended: Case, settings: Settings, database: Database, bucket: dict[str, str], tmp_path: Path
) -> None:
    await alarms(database, ended.run.id)
    injector = FaultInjector(tmp_path / "faults")
    injector.arm("trainer.file_published")
    environment = {"PATH": os.environ["PATH"], "LEYDEN_DATABASE_URL": database.dsn, **bucket, **injector.environment}
    root = Path(__file__).resolve().parents[3]
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", PUBLISHING, env=environment, cwd=root)
    try:
        assert await asyncio.wait_for(process.wait(), 60) == -signal.SIGKILL
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    half = VersionKey(ended.run.id, 2, (await ended.versions())[2].content_sha256)
    assert half in await published(ended)
    with pytest.raises(NotPublished):
        await asyncio.to_thread(WeightStore(STORE).manifest, half)
    assert list(await alarms(database, ended.run.id)) == ["not_published"]
    await publish_late(settings, database, set())
    await asyncio.to_thread(WeightStore(STORE).manifest, half)
    assert await published(ended) == await retained(ended)
    assert [row.ended_at is not None for row in await ended.rows(tables.Alarm)] == [True]  # type: ignore[attr-defined]


async def test_damaged_files_are_not_published_and_not_read_again(
    ended: Case, settings: Settings, database: Database
) -> None:
    await alarms(database, ended.run.id)
    flip_a_bit(Path((await ended.versions())[2].path) / "model.safetensors")
    damaged = set[str]()
    await publish_late(settings, database, damaged)
    assert damaged == {ended.run.id}
    assert [key.version for key in await published(ended)] == [1]
    assert list(await alarms(database, ended.run.id)) == ["not_published"]


async def test_the_controller_waits_for_the_trainer_of_a_run_that_ended(
    ended: Case, settings: Settings, database: Database
) -> None:
    await alarms(database, ended.run.id)
    lock = AdvisoryLock(database.dsn, f"trainer:{ended.run.id}")
    assert await lock.acquire()
    await publish_late(settings, database, set())
    assert [key.version for key in await published(ended)] == [1]
    await lock.release()
    await publish_late(settings, database, set())
    assert await published(ended) == await retained(ended)
