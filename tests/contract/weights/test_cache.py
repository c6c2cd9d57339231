"""The versions of a node: each is read once, whoever asks, and the size of the folder is bounded."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from leyden.libs.contracts.weights import weights_sha256
from leyden.libs.faults import FaultInjector
from leyden.libs.weights import Damaged, VersionKey, WeightStore
from leyden.libs.weights.cache import NodeCache
from leyden.services.controller.fetcher.app import create_fetcher_app
from leyden.services.controller.fetcher.settings import Settings
from tests.contract.weights.conftest import files_in, key_of, make_version
from tests.contract.weights.test_store import NAMES, objects, overwrite
from tests.support.object_store import STORE

LARGE = 2**30
POINTS = ("fetcher.file_read",)
FETCH = """
import sys
from pathlib import Path
from leyden.libs.weights import VersionKey, WeightStore
from leyden.libs.weights.cache import NodeCache

url, folder, content_sha256 = sys.argv[1:]
cache = NodeCache(Path(folder), WeightStore(url), 2**30)
cache.fetch(VersionKey("run-a", 1, content_sha256))
"""


class CountingStore(WeightStore):
    """Counts its reads, which begin once every asker has come."""

    def __init__(self, url: str, askers: int) -> None:
        super().__init__(url)
        self.reads, self._all_here = 0, threading.Barrier(askers)

    def ask(self, cache: NodeCache, key: VersionKey) -> Path:
        """For one thread of the askers."""
        self._all_here.wait(30)
        return cache.fetch(key)

    def fetch(self, *arguments: Any, **options: Any) -> None:
        self.reads += 1
        super().fetch(*arguments, **options)


def test_several_engines_of_a_node_read_a_version_once(bucket: dict[str, str], version: Path, tmp_path: Path) -> None:
    store, key = CountingStore(STORE, askers=4), key_of(version)
    store.publish(key, version)
    # Locks of files exclude each other by open file, as those of several processes do.
    caches = [NodeCache(tmp_path / "node", store, LARGE) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        found = set(threads.map(lambda cache: store.ask(cache, key), caches))
    assert store.reads == 1
    assert set(files_in(found.pop())) == NAMES
    assert not found
    assert [one.name for one in (tmp_path / "node").iterdir() if one.is_dir()] == [f"run-a-1-{key.content_sha256}"]


def test_a_killed_fetcher_gives_no_half_and_the_next_one_removes_it(
    bucket: dict[str, str], version: Path, tmp_path: Path
) -> None:
    store, key, node = WeightStore(STORE), key_of(version), tmp_path / "node"
    store.publish(key, version)
    injector = FaultInjector(tmp_path / "faults")
    injector.arm(POINTS[0])
    command = [sys.executable, "-c", FETCH, STORE, str(node), key.content_sha256]
    done = subprocess.run(command, env={**os.environ, **injector.environment}, timeout=120)
    assert done.returncode == -signal.SIGKILL
    [half] = [one for one in node.iterdir() if one.is_dir()]
    assert half.name.startswith(".")
    assert 0 < len(files_in(half)) < len(NAMES)
    # Another version is asked for: nobody may ever want the first one again.
    other = make_version(tmp_path / "other")
    store.publish(key_of(other, 2), other)
    found = NodeCache(node, store, LARGE).fetch(key_of(other, 2))
    assert [one for one in node.iterdir() if one.is_dir()] == [found]
    assert {one.name for one in node.iterdir() if one.is_file()} == {f".{found.name}.lock"}
    assert set(files_in(NodeCache(node, store, LARGE).fetch(key))) == NAMES


def test_the_versions_asked_for_longest_ago_go(bucket: dict[str, str], tmp_path: Path) -> None:
    store, node = WeightStore(STORE), tmp_path / "node"
    folders = [make_version(tmp_path / str(number)) for number in range(4)]
    keys = [key_of(folder, number) for number, folder in enumerate(folders)]
    for key, folder in zip(keys, folders, strict=True):
        store.publish(key, folder)
    cache = NodeCache(node, store, 10 * 2**20)
    for number in (0, 1, 2):
        cache.fetch(keys[number])
    cache.fetch(keys[0])
    cache.fetch(keys[3])

    def held() -> set[int]:
        return {int(one.name.split("-")[2]) for one in node.iterdir() if not one.name.startswith(".")}

    assert held() == {2, 0, 3}
    # Another engine of the node may still read the version that it was given.
    small = NodeCache(node, store, 1)
    small.fetch(keys[1])
    assert held() == {3, 1}
    cache.close()
    small.fetch(keys[1])
    assert held() == {1}
    assert {one.name for one in node.iterdir() if one.name.startswith(".")} == {
        f".run-a-1-{keys[1].content_sha256}.lock"
    }


def test_a_full_disk_loses_old_versions_and_no_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = tmp_path / "node"

    class Store:
        """Has room for two versions on the node's disk."""

        def fetch(self, key: VersionKey, folder: Path, *, adapter: bool) -> None:
            if sum(one.is_dir() and not one.name.startswith(".") for one in node.iterdir()) >= 2:
                raise OSError(errno.ENOSPC, "No space left on device")
            (folder / "weights").write_bytes(b"w")

    cache = NodeCache(node, cast(WeightStore, Store()), 2**40)
    for version in range(4):
        assert (cache.fetch(VersionKey("run-a", version, "f" * 64)) / "weights").exists()
    assert len([one for one in node.iterdir() if not one.name.startswith(".")]) == 2


def test_a_version_stays_until_its_process_ends(bucket: dict[str, str], tmp_path: Path) -> None:
    store, node = WeightStore(STORE), tmp_path / "node"
    first, second = make_version(tmp_path / "1"), make_version(tmp_path / "2")
    store.publish(key_of(first), first)
    store.publish(key_of(second, 2), second)
    command = [sys.executable, "-c", f"{FETCH}print(flush=True)\ninput()\n", STORE, str(node), key_of(first)[2]]
    cache = NodeCache(node, store, 1)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        assert engine.stdout
        engine.stdout.readline()
        found = cache.fetch(key_of(second, 2))
        assert len(list(node.glob("run-a-*"))) == 2
        engine.kill()
    assert cache.fetch(key_of(second, 2)) == found
    assert list(node.glob("run-a-*")) == [found]


def test_fetchers_of_a_small_folder_remove_versions_of_each_other_and_all_answer(tmp_path: Path) -> None:
    store = WeightStore(f"file://{tmp_path}/store")
    keys = []
    for number in range(6):
        folder = tmp_path / "made" / str(number)
        folder.mkdir(parents=True)
        for part in range(20):
            (folder / f"part{part}.safetensors").write_bytes(bytes([number]) * 1000)
        keys.append(VersionKey("run-a", number, weights_sha256(folder)))
        store.publish(keys[-1], folder)

    def ask(first: int) -> None:
        cache = NodeCache(tmp_path / "node", store, 45_000)
        for place in range(60):
            cache.fetch(keys[(first + place * (first + 1)) % len(keys)])

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(ask, range(6)))


def test_a_corrupt_object_leaves_nothing_in_the_folder(bucket: dict[str, str], version: Path, tmp_path: Path) -> None:
    store, key = WeightStore(STORE), key_of(version)
    store.publish(key, version)
    overwrite(next(one for one in objects() if one.endswith("config.json")), b"[]")
    cache = NodeCache(tmp_path / "node", store, LARGE)
    with pytest.raises(Damaged):
        cache.fetch(key)
    assert [one for one in (tmp_path / "node").iterdir() if one.is_dir()] == []
    store.remove(key)
    store.publish(key, version)
    assert set(files_in(cache.fetch(key))) == NAMES


async def test_the_fetcher_answers_with_a_folder_and_asks_for_the_key(
    bucket: dict[str, str], version: Path, tmp_path: Path
) -> None:
    store, key = WeightStore(STORE), key_of(version)
    store.publish(key, version)
    app = create_fetcher_app(Settings(weight_store=STORE, folder=tmp_path / "node", key="admin"))
    wanted: dict[str, object] = {"run_id": "run-a", "version": 1, "content_sha256": key.content_sha256}
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://node") as http:
            assert (await http.post("/fetch", json=wanted)).status_code == 401
            http.headers["authorization"] = "Bearer admin"
            answer = await http.post("/fetch", json=wanted)
            assert answer.status_code == 200
            assert set(files_in(Path(answer.json()["path"]))) == NAMES
            unknown = await http.post("/fetch", json={**wanted, "version": 2})
            assert (unknown.status_code, unknown.json()["cause"]) == (404, "unknown")
            for bad in ({"run_id": "../x"}, {"content_sha256": "../" * 20}, {"version": -1}):
                assert (await http.post("/fetch", json={**wanted, **bad})).status_code == 422
            overwrite(next(one for one in objects() if one.endswith("adapter_model.safetensors")), b"other")
            damaged = await http.post("/fetch", json={**wanted, "adapter": True})
            assert (damaged.status_code, damaged.json()["cause"]) == (409, "damaged")
            assert "remove s3://" in damaged.json()["detail"]


def test_a_fetcher_without_a_store_is_refused() -> None:
    with pytest.raises(ValueError, match="LEYDEN_WEIGHT_STORE"):
        Settings()
