"""Versions that the API has in the object store alone, as in a cluster: listed and downloaded as from a folder."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from leyden.libs.client import Client, Conflict, Refused, Unreachable
from leyden.libs.contracts.weights import weights_sha256
from leyden.libs.store.database import Database
from leyden.libs.weights import VersionKey, WeightStore
from tests.contract.api.test_weights import NAMES, make_version
from tests.contract.weights.test_store import objects, overwrite
from tests.fakes.served_api import TOKEN, served_api
from tests.support import builders
from tests.support.object_store import STORE


@pytest.fixture
def leyden(bucket: dict[str, str], postgres_dsn: str) -> Iterator[Client]:
    with served_api(postgres_dsn) as url, Client(url, TOKEN, patience_seconds=0.0) as client:
        yield client


async def publish(database: Database, folder: Path) -> tuple[str, dict[str, bytes]]:
    """A run whose version 0 is in the store and no more in its folder."""
    run = await builders.add_run(database)
    make_version(folder)
    digest = weights_sha256(folder)
    await builders.add_policy_version(database, run, 0, path=str(folder), content_sha256=digest)
    files = {name: (folder / name).read_bytes() for name in NAMES}
    await asyncio.to_thread(WeightStore(STORE).publish, VersionKey(run.id, 0, digest), folder)
    shutil.rmtree(folder)
    return run.id, files


async def test_a_version_is_downloaded_from_the_store(leyden: Client, database: Database, tmp_path: Path) -> None:
    run_id, files = await publish(database, tmp_path / "version")
    found = await asyncio.to_thread(leyden.version_files, run_id, 0)
    assert found.files is not None
    assert {one.name: one.size_bytes for one in found.files} == {name: len(text) for name, text in files.items()}
    got = await asyncio.to_thread(leyden.download_version, run_id, 0, tmp_path / "got")
    assert {str(one.relative_to(got)): one.read_bytes() for one in got.rglob("*") if one.is_file()} == files


async def test_a_version_that_is_in_neither_place_says_so(leyden: Client, database: Database, tmp_path: Path) -> None:
    run = await builders.add_run(database)
    await builders.add_policy_version(database, run, 0, path=str(tmp_path / "nowhere"))
    with pytest.raises(Conflict, match=r"s3://weights/team/.* is not published, and the API's machine has no folder"):
        await asyncio.to_thread(leyden.download_version, run.id, 0, tmp_path / "got")


async def test_damaged_objects_leave_no_folder(leyden: Client, database: Database, tmp_path: Path) -> None:
    run_id, files = await publish(database, tmp_path / "version")
    path = next(one for one in objects() if one.endswith("/model.safetensors"))
    overwrite(path, bytes(len(files["model.safetensors"])))
    with pytest.raises(Refused, match="damaged"):
        await asyncio.to_thread(leyden.download_version, run_id, 0, tmp_path / "got")
    overwrite(next(one for one in objects() if "manifest" in one), b"{}")
    with pytest.raises(Conflict, match="publishes it again"):
        await asyncio.to_thread(leyden.download_version, run_id, 0, tmp_path / "got")
    assert list(tmp_path.iterdir()) == []


async def test_a_store_that_is_away_is_no_fault_of_the_version(
    bucket: dict[str, str], postgres_dsn: str, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id, _ = await publish(database, tmp_path / "version")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with served_api(postgres_dsn) as url, Client(url, TOKEN, patience_seconds=0.0) as client:
        with pytest.raises(Unreachable, match="the store cannot be used"):
            await asyncio.to_thread(client.download_version, run_id, 0, tmp_path / "got")
        found = await asyncio.to_thread(client.version_files, run_id, 0)
        assert found.files is None and found.reason is not None
