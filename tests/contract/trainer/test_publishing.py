"""A trainer with an object store: what it records is there, and what it no longer retains is not."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from leyden.libs.faults import FaultInjector
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.weights import NotPublished, VersionKey, WeightStore
from tests.contract.trainer.test_kills import train
from tests.contract.trainer.test_steps import Case
from tests.support.object_store import STORE

FAILURES = "trainer_publications_failed_total"
POINTS = ("trainer.file_published",)


@pytest.fixture
def case(
    bucket: dict[str, str], database: Database, postgres_dsn: str, tiny_model: Path, tmp_path: Path, redis_url: str
) -> Case:
    return Case(database, postgres_dsn, tiny_model, tmp_path / "runs", redis_url)


async def prepare(case: Case, steps: int, **training: object) -> None:
    await case.open(steps=steps, **training)
    for number in range(2 * steps):
        await case.add_group(number, version=number // 2)


async def retained(case: Case) -> set[VersionKey]:
    rows = (await case.versions()).items()
    return {VersionKey(case.run.id, number, row.content_sha256) for number, row in rows if number and not row.pruned_at}


async def published(case: Case) -> set[VersionKey]:
    return await asyncio.to_thread(WeightStore(STORE).versions, case.run.id)


async def test_the_store_has_the_versions_that_the_run_retains(case: Case, tmp_path: Path) -> None:
    await prepare(case, 3, keep_checkpoints=1)
    await case.train()
    assert await published(case) == await retained(case)
    assert [key.version for key in await published(case)] == [3]
    key = max(await published(case))
    await asyncio.to_thread(WeightStore(STORE).fetch, key, tmp_path / "got")
    folder = Path((await case.versions())[3].path)
    assert {one.name: one.read_bytes() for one in (tmp_path / "got").iterdir()} == {
        one.name: one.read_bytes() for one in folder.iterdir()
    }
    steps = [row.metrics for row in await case.rows(tables.Step)]  # type: ignore[attr-defined]
    assert all(one["publish_seconds"] > 0 for one in steps)


async def test_a_store_that_is_away_stops_no_run_and_gets_its_versions_from_the_next_trainer(
    case: Case, bucket: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await prepare(case, 2)
    before = REGISTRY.get_sample_value(FAILURES) or 0.0
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        await case.train()
    assert len(await retained(case)) == 2
    assert await published(case) == set()
    assert (REGISTRY.get_sample_value(FAILURES) or 0.0) > before
    # As where an operator removed a damaged version.
    await case.train()
    assert await published(case) == await retained(case)


async def test_a_killed_trainer_publishes_no_half_and_the_next_one_all(
    case: Case, bucket: dict[str, str], tmp_path: Path
) -> None:
    await prepare(case, 2)
    injector = FaultInjector(tmp_path / "faults")
    injector.arm(POINTS[0])
    assert await train(case, injector, **bucket) == -signal.SIGKILL
    [half] = await published(case)
    with pytest.raises(NotPublished):
        await asyncio.to_thread(WeightStore(STORE).manifest, half)
    await case.train()
    assert await published(case) == await retained(case)
    for key in await published(case):
        await asyncio.to_thread(WeightStore(STORE).manifest, key)
