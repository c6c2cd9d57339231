"""Versions that the fetcher beside an engine reads from the object store, and the trainer's folder where it cannot."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from prometheus_client import REGISTRY
from pydantic import SecretStr

from leyden.libs.contracts.weights import weights_sha256
from leyden.libs.store.database import Database
from leyden.libs.weights import VersionKey, WeightStore
from leyden.services.controller.engines.targets import TargetVersion
from leyden.services.controller.fetcher.app import create_fetcher_app
from leyden.services.controller.fetcher.settings import Settings as FetcherSettings
from leyden.services.controller.settings import Settings
from leyden.services.controller.upkeep.deletion import delete_marked
from tests.contract.controller.test_deletion import full_run, mark
from tests.contract.controller.test_engines import fleet_of
from tests.contract.weights.conftest import files_in, make_version
from tests.fakes.engine_client import ADMIN_KEY, KEY
from tests.fakes.scripted_engine import ScriptedEngine, running
from tests.fakes.served import served
from tests.support.object_store import STORE
from tests.support.waiting import eventually

FAILURES = "controller_version_fetch_failures_total"


@pytest.fixture
def node(bucket: dict[str, str], tmp_path: Path) -> Iterator[int]:
    """The port of the fetcher of a node, whose cache is the folder `node`."""
    settings = FetcherSettings(folder=tmp_path / "node", key=SecretStr(ADMIN_KEY))
    with served(create_fetcher_app(settings)) as url:
        yield urlsplit(url).port or 0


def keys() -> dict[str, SecretStr]:
    return {"engine_api_key": SecretStr(KEY), "engine_admin_key": SecretStr(ADMIN_KEY)}


def published(folder: Path, run_id: str, version: int) -> TargetVersion:
    make_version(folder)
    target = TargetVersion(run_id, version, str(folder), weights_sha256(folder))
    WeightStore(STORE).publish(VersionKey(run_id, version, target.content_sha256), folder)
    return target


async def test_an_engine_loads_the_version_that_the_fetcher_read(
    database: Database, redis_url: str, node: int, tmp_path: Path
) -> None:
    target = await asyncio.to_thread(published, tmp_path / "run-a" / "versions" / "1", "run-a", 1)
    engine = ScriptedEngine()
    async with (
        running(engine),
        fleet_of(database, redis_url, engine.url, fetcher_port=node, **keys()) as fleet,
    ):
        # The base model is on every node.
        fleet.set_target(TargetVersion("run-a", 0, "/models/base", "hash"))
        await eventually(lambda: fleet.served_version("run-a") == 0)
        fleet.set_target(target)
        await eventually(lambda: fleet.served_version("run-a") == 1)
    cached = tmp_path / "node" / f"run-a-1-{target.content_sha256}"
    assert [line for line in engine.journal if line.startswith("update")] == [
        "update /models/base run-a:0 flush=True",
        f"update {cached} run-a:1 flush=True",
    ]
    assert files_in(cached) == {k: v for k, v in files_in(Path(target.path)).items() if k != ".hidden"}


async def test_an_adapter_alone_is_read_for_engines_that_runs_share(
    database: Database, redis_url: str, node: int, tmp_path: Path
) -> None:
    target = await asyncio.to_thread(published, tmp_path / "run-a" / "versions" / "3", "run-a", 3)
    engine = ScriptedEngine()
    async with (
        running(engine),
        fleet_of(database, redis_url, engine.url, adapters=2, fetcher_port=node, **keys()) as fleet,
    ):
        fleet.set_target(target)
        await eventually(lambda: fleet.served_version("run-a") == 3)
    cached = tmp_path / "node" / f"run-a-3-{target.content_sha256}-adapter"
    assert engine.adapters == {"run-a:3": f"{cached}/adapter"}
    assert set(files_in(cached)) == {"adapter/adapter_model.safetensors"}


async def test_an_engine_loads_from_the_trainers_folder_where_the_fetcher_fails(
    database: Database, redis_url: str, node: int, tmp_path: Path
) -> None:
    folder = make_version(tmp_path / "run-a" / "versions" / "1")
    target = TargetVersion("run-a", 1, str(folder), weights_sha256(folder))
    before = REGISTRY.get_sample_value(FAILURES) or 0.0
    for port in (node, 9):
        engine = ScriptedEngine()
        async with (
            running(engine),
            fleet_of(database, redis_url, engine.url, fetcher_port=port, **keys()) as fleet,
        ):
            fleet.set_target(target)
            await eventually(lambda seen=fleet: seen.served_version("run-a") == 1)
        assert f"update {folder} run-a:1 flush=True" in engine.journal
    # Not published, and nobody listens.
    assert REGISTRY.get_sample_value(FAILURES) == before + 2


async def test_a_deleted_run_leaves_nothing_in_the_store(
    bucket: dict[str, str], database: Database, tmp_path: Path
) -> None:
    gone, kept = [await full_run(database, tmp_path) for _ in range(2)]
    for run in (gone, kept):
        await asyncio.to_thread(published, tmp_path / "published" / run.id, run.id, 1)
    await mark(database, gone)
    await delete_marked(Settings(database_url=database.dsn, log_folder=tmp_path / "logs"), database)
    store = WeightStore(STORE)
    assert await asyncio.to_thread(store.versions, gone.id) == set()
    assert len(await asyncio.to_thread(store.versions, kept.id)) == 1
