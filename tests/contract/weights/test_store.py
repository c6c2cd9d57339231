"""Versions in a store of S3's kind: whole or not there, compared with their hashes, and no credential in sight."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
from pydantic import ValidationError

from leyden.libs.faults import FaultInjector
from leyden.libs.weights import Damaged, NotPublished, StoreSettings, StoreUnusable, WeightStore
from tests.contract.weights.conftest import files_in, key_of
from tests.support.object_store import SECRET, STORE

PUBLISH = """
import sys
from pathlib import Path
from leyden.libs.weights import VersionKey, WeightStore
WeightStore(sys.argv[1]).publish(VersionKey("run-a", 1, sys.argv[3]), Path(sys.argv[2]))
"""
PEAK = """
import resource
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
NAMES = {"adapter/adapter_model.safetensors", "config.json", "model.safetensors"}


def opened() -> tuple[fsspec.AbstractFileSystem, str]:
    """The client of the store, and its place there."""
    found: tuple[fsspec.AbstractFileSystem, str] = fsspec.url_to_fs(
        os.environ["LEYDEN_WEIGHT_STORE"], use_listings_cache=False, skip_instance_cache=True
    )
    return found


def objects() -> list[str]:
    files, place = opened()
    return sorted(files.find(place))


def overwrite(path: str, content: bytes) -> None:
    opened()[0].pipe_file(path, content)


def test_a_version_comes_back_as_it_was_published(bucket: dict[str, str], version: Path, tmp_path: Path) -> None:
    store, key = WeightStore(bucket["LEYDEN_WEIGHT_STORE"]), key_of(version)
    assert store.publish(key, version)
    assert not store.publish(key, version)
    store.fetch(key, tmp_path / "all")
    store.fetch(key, tmp_path / "adapter-alone", adapter=True)
    assert files_in(tmp_path / "all") == {name: (version / name).read_bytes() for name in NAMES}
    assert set(files_in(tmp_path / "adapter-alone")) == {"adapter/adapter_model.safetensors"}
    assert [b"".join(store.stream(key, one)) for one in store.manifest(key).files] == [
        (version / name).read_bytes() for name in sorted(NAMES)
    ]


def test_a_publisher_holds_a_part_of_a_file(bucket: dict[str, str], version: Path) -> None:
    peaks = []
    for size in (0, 400 * 2**20):
        with (version / "model.safetensors").open("wb") as file:
            file.truncate(size)
        command = [sys.executable, "-c", PUBLISH + PEAK, bucket["LEYDEN_WEIGHT_STORE"], str(version)]
        command.append(key_of(version).content_sha256)
        peaks.append(int(subprocess.run(command, capture_output=True, check=True, timeout=120).stdout) * 2**10)
    assert peaks[1] - peaks[0] < 250 * 2**20


def test_a_killed_publisher_leaves_no_version(bucket: dict[str, str], version: Path, tmp_path: Path) -> None:
    store, key, injector = (
        WeightStore(bucket["LEYDEN_WEIGHT_STORE"]),
        key_of(version),
        FaultInjector(tmp_path / "faults"),
    )
    injector.arm("trainer.file_published")
    command = [sys.executable, "-c", PUBLISH, store.url, str(version), key.content_sha256]
    done = subprocess.run(command, env={**os.environ, **injector.environment}, timeout=120)
    assert done.returncode == -9
    assert len(objects()) == 1
    with pytest.raises(NotPublished):
        store.fetch(key, tmp_path / "got")
    assert store.versions("run-a") == {key}
    assert store.publish(key, version)
    assert len(objects()) == 4


def test_other_weights_of_the_same_version_lie_beside_it(bucket: dict[str, str], version: Path, tmp_path: Path) -> None:
    store, key = WeightStore(bucket["LEYDEN_WEIGHT_STORE"]), key_of(version)
    store.publish(key, version)
    (version / "model.safetensors").write_bytes(b"other")
    with pytest.raises(Damaged, match="restore it"):
        store.publish(key._replace(version=2), version)
    other = key_of(version)
    store.publish(other, version)
    assert store.versions("run-a") == {key, other}
    store.remove(key)
    assert store.versions("run-a") == {other}
    store.remove_run("run-a")
    store.remove_run("run-a")
    assert objects() == []


@pytest.mark.parametrize("content", [b"x" * 7, b"short", None])
def test_a_corrupt_object_is_refused_with_the_remedy(
    bucket: dict[str, str], version: Path, tmp_path: Path, content: bytes | None
) -> None:
    store, key = WeightStore(bucket["LEYDEN_WEIGHT_STORE"]), key_of(version)
    store.publish(key, version)
    path = next(one for one in objects() if "adapter" in one)
    if content is None:
        opened()[0].rm(path)
    else:
        overwrite(path, content)
    with pytest.raises(Damaged, match=r"adapter_model.safetensors is not what was published: remove .*publishes it"):
        store.fetch(key, tmp_path / "got")


def test_a_corrupt_manifest_is_refused_and_published_again(
    bucket: dict[str, str], version: Path, tmp_path: Path
) -> None:
    store, key = WeightStore(bucket["LEYDEN_WEIGHT_STORE"]), key_of(version)
    store.publish(key, version)
    path = next(one for one in objects() if "manifest" in one)
    for content in (b"", b'{"files": []}', b'{"files": [{"name": "../x", "size_bytes": 1, "sha256": "0"}]}'):
        overwrite(path, content)
        with pytest.raises(Damaged, match=r"manifest.json is not what was published"):
            store.manifest(key)
    assert store.publish(key, version)
    store.fetch(key, tmp_path / "got")


def test_a_missing_bucket_is_named(bucket: dict[str, str], version: Path) -> None:
    url = bucket["LEYDEN_WEIGHT_STORE"].replace("weights", "nowhere")
    with pytest.raises(StoreUnusable, match=f"{url}/run-a/1/.*check its address, endpoint and credentials"):
        WeightStore(url).publish(key_of(version), version)


def test_errors_name_the_store_and_no_credential(
    bucket: dict[str, str], version: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = key_of(version)
    with pytest.raises(StoreUnusable) as missing:
        WeightStore("s3://no-such-bucket/team").publish(key, version)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StoreUnusable) as away:
        WeightStore(STORE).manifest(key)
    for error in (missing, away):
        assert "check its address, endpoint and credentials" in str(error.value)
        assert SECRET not in str(error.value)
    with pytest.raises(StoreUnusable, match="check its address"):
        WeightStore("nosuchscheme://bucket/prefix")


@pytest.mark.parametrize(
    "url", ["s3://key:hidden@bucket/prefix", "s3://bucket/prefix?secret=hidden", "bucket", "s3://"]
)
def test_an_address_with_a_credential_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ValidationError) as error:
        StoreSettings(weight_store=url)
    message = error.value.errors()[0]["msg"]
    assert "AWS_ACCESS_KEY_ID" in message
    assert "hidden" not in message
