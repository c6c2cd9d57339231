"""The files of policy versions: listed, downloaded in a stream of bounded memory, checked, and safe in their paths."""

from __future__ import annotations

import asyncio
import os
import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import httpx
import pytest

from leyden.libs.client import Client, Conflict, Forbidden, NotFound, Refused, Unauthorised, Unreachable
from leyden.libs.contracts.api.tokens import ApiScope
from leyden.libs.contracts.weights import weights_sha256
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.services.api.read.archive import open_archive, version_files
from tests.fakes.served_api import TOKEN
from tests.support import builders

LARGE = 2**30
"""Bytes of a file that memory must not hold; it is sparse."""
SPARE = 128 * 2**20
"""The growth of memory that the download of it may have, client included."""


@pytest.fixture
def leyden(api_url: str) -> Iterator[Client]:
    with Client(api_url, TOKEN, patience_seconds=0.0) as client:
        yield client


def make_version(folder: Path) -> Path:
    """A version with an adapter, and with what is no part of it."""
    (folder / "adapter").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(os.urandom(3 * 2**20 + 5))
    (folder / "adapter" / "adapter_model.safetensors").write_bytes(b"adapter")
    (folder / "config.json").write_text("{}")
    (folder / ".hidden").write_text("secret")
    (folder / "logs").mkdir()
    (folder / "logs" / "secret.txt").write_text("secret")
    return folder


async def add_version(database: Database, run: tables.Run, folder: Path, version: int = 0) -> None:
    digest = weights_sha256(folder)
    await builders.add_policy_version(database, run, version, path=str(folder), content_sha256=digest)


DESCRIPTORS = Path("/proc/self/fd")
NAMES = ["adapter/adapter_model.safetensors", "config.json", "model.safetensors"]


async def test_a_version_is_downloaded_as_the_trainer_wrote_it(
    leyden: Client, database: Database, tmp_path: Path
) -> None:
    run = await builders.add_run(database)
    folder = make_version(tmp_path / "version")
    await add_version(database, run, folder)
    found = await asyncio.to_thread(leyden.version_files, run.id, 0)
    assert found.files is not None
    assert [one.name for one in found.files] == NAMES
    got = await asyncio.to_thread(leyden.download_version, run.id, 0, tmp_path / "got")
    assert sorted(str(one.relative_to(got)) for one in got.rglob("*") if one.is_file()) == NAMES
    assert all((got / name).read_bytes() == (folder / name).read_bytes() for name in NAMES)
    with pytest.raises(Refused, match="exists"):
        await asyncio.to_thread(leyden.download_version, run.id, 0, tmp_path / "got")


async def test_the_answer_is_a_tar_of_the_length_that_it_promises(
    api_http: httpx.AsyncClient, database: Database, tmp_path: Path
) -> None:
    run = await builders.add_run(database)
    await add_version(database, run, make_version(tmp_path / ("v" * 200)))
    long_name = "n" * 150 + ".safetensors"
    (tmp_path / ("v" * 200) / long_name).write_bytes(b"x" * 513)
    answer = await api_http.get(f"/v1/runs/{run.id}/policies/0/weights")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-tar")
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert answer.headers["content-disposition"] == f'attachment; filename="{run.id}-version-0.tar"'
    with tarfile.open(fileobj=BytesIO(answer.content)) as archive:
        assert sorted(archive.getnames()) == sorted([*NAMES, long_name])


async def test_memory_does_not_grow_with_the_weights(leyden: Client, database: Database, tmp_path: Path) -> None:
    run = await builders.add_run(database)
    folder = make_version(tmp_path / "version")
    with (folder / "model-2.safetensors").open("wb") as file:
        file.truncate(LARGE)
    await add_version(database, run, folder)
    # From here on the kernel counts the largest size anew.
    Path("/proc/self/clear_refs").write_text("5")
    before = _peak_bytes()
    await asyncio.to_thread(leyden.download_version, run.id, 0, tmp_path / "got")
    assert (tmp_path / "got" / "model-2.safetensors").stat().st_size == LARGE
    assert _peak_bytes() - before < SPARE


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


async def test_links_that_lead_out_are_refused_and_those_of_a_cache_are_not(
    leyden: Client, database: Database, tmp_path: Path
) -> None:
    run = await builders.add_run(database)
    (tmp_path / "secret").write_text("secret")
    folder = make_version(tmp_path / "version")
    await add_version(database, run, folder)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(tmp_path / "secret")
    found = await asyncio.to_thread(leyden.version_files, run.id, 0)
    assert found.files is None and found.reason is not None and "config.json is a link" in found.reason
    with pytest.raises(Conflict, match="leads out"):
        await asyncio.to_thread(leyden.download_version, run.id, 0, tmp_path / "got")

    # Hugging Face's cache: files of a snapshot are links to those of all snapshots.
    snapshot, blobs = tmp_path / "model" / "snapshots" / "abc", tmp_path / "model" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "1").write_bytes(b"weights")
    (snapshot / "model.safetensors").symlink_to(Path("..", "..", "blobs", "1"))
    link = tmp_path / "base"
    link.symlink_to(snapshot)
    await add_version(database, run, link, 1)
    await asyncio.to_thread(leyden.download_version, run.id, 1, tmp_path / "base-model")
    assert (tmp_path / "base-model" / "model.safetensors").read_bytes() == b"weights"


async def test_a_version_without_files_says_why(leyden: Client, database: Database, tmp_path: Path) -> None:
    run = await builders.add_run(database)
    await add_version(database, run, tmp_path / "nowhere", 0)
    (tmp_path / "empty").mkdir()
    await add_version(database, run, tmp_path / "empty", 1)
    await builders.add_policy_version(database, run, 2, pruned_at=run.created_at)
    for version, reason in ((0, "has no folder .*leyden policy export"), (1, "is empty"), (2, "were removed")):
        found = await asyncio.to_thread(leyden.version_files, run.id, version)
        assert found.files is None and found.reason is not None
        with pytest.raises(Conflict, match=reason):
            await asyncio.to_thread(leyden.download_version, run.id, version, tmp_path / "got")
    with pytest.raises(NotFound, match="list its versions"):
        await asyncio.to_thread(leyden.version_files, run.id, 3)
    with pytest.raises(NotFound, match="no policy"):
        await asyncio.to_thread(leyden.version_files, run.id, 0, policy="critic")
    assert {one.name for one in tmp_path.iterdir()} == {"empty"}


async def test_a_further_policy_has_weights_of_its_own(leyden: Client, database: Database, tmp_path: Path) -> None:
    run = await builders.add_run(database)
    critic = await builders.add_run(database, lead_run_id=run.id, policy="critic")
    await add_version(database, critic, make_version(tmp_path / "version"))
    await asyncio.to_thread(leyden.download_version, run.id, 0, tmp_path / "got", policy="critic")
    assert (tmp_path / "got" / "config.json").read_text() == "{}"


async def test_damaged_or_cut_weights_leave_no_folder(leyden: Client, database: Database, tmp_path: Path) -> None:
    run = await builders.add_run(database)
    folder = make_version(tmp_path / "version")
    await add_version(database, run, folder)
    (folder / "model.safetensors").write_bytes(b"others")
    with pytest.raises(Refused, match="damaged"):
        await asyncio.to_thread(leyden.download_version, run.id, 0, tmp_path / "got")
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(LARGE)

    def cut() -> None:
        with leyden._http.stream(f"/v1/runs/{run.id}/policies/0/weights") as chunks:
            next(chunks)
            os.truncate(folder / "model.safetensors", 2**20)
            for _ in chunks:
                pass

    with pytest.raises(Unreachable):
        await asyncio.to_thread(cut)
    assert [one.name for one in tmp_path.iterdir()] == ["version"]


async def test_weights_need_a_token_that_may_read(
    leyden: Client, api_url: str, database: Database, tmp_path: Path
) -> None:
    run = await builders.add_run(database)
    await add_version(database, run, make_version(tmp_path / "version"))
    agent = await asyncio.to_thread(leyden.create_token, "agent", [ApiScope.ATTEMPTS])
    reader = await asyncio.to_thread(leyden.create_token, "ann", [ApiScope.READ])
    for token, error in ((agent.token, Forbidden), (None, Unauthorised)):
        with Client(api_url, token, patience_seconds=0.0) as client, pytest.raises(error):
            await asyncio.to_thread(client.download_version, run.id, 0, tmp_path / "got")
    with Client(api_url, reader.token) as client:
        await asyncio.to_thread(client.download_version, run.id, 0, tmp_path / "got")


async def test_versions_tell_what_they_earned_in_training_and_which_engines_serve_them(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    run = await builders.add_run(database)
    critic = await builders.add_run(database, lead_run_id=run.id, policy="critic")
    for version in range(3):
        await builders.add_policy_version(database, run, version, pruned_at=run.created_at if version == 0 else None)
        await builders.add_policy_version(database, critic, version)
    for number, (version, state) in enumerate(((1, "complete"), (1, "complete"), (2, "open"))):
        _, rollouts = await builders.add_group(database, run, number, admitted_version=version, state=state)
        for rollout, reward in zip(rollouts, (0.25, 0.75), strict=True):
            await builders.finish_rollout(database, rollout, reward=reward)
    async with database.session() as session:
        for url, served, state in (("a", critic.id, "serving"), ("b", run.id, "serving"), ("c", run.id, "unreachable")):
            session.add(tables.Engine(url=url, run_id=served, policy_version=2, state=state))
        await session.flush()
        session.add(tables.EngineAdapter(url="a", run_id=run.id, policy_version=1))

    async def shown(**words: str) -> list[tuple[int, float | None, int]]:
        answer = await api_http.get(f"/v1/runs/{run.id}/policies", params=words)
        return [(one["version"], one["reward_mean"], one["engines"]) for one in answer.json()["items"]]

    assert await shown() == [(0, None, 0), (1, 0.5, 1), (2, None, 1)]
    assert await shown(kept="false") == [(0, None, 0)]
    assert await shown(kept="true", limit="1") == [(1, 0.5, 1)]
    assert await shown(policy="critic", kept="true") == [(0, None, 0), (1, 0.5, 0), (2, None, 1)]


def test_an_archive_that_nobody_reads_closes_its_files(tmp_path: Path) -> None:
    stream = open_archive(version_files(make_version(tmp_path / "version")))
    before = len(list(DESCRIPTORS.iterdir()))
    stream.close()
    assert before - len(list(DESCRIPTORS.iterdir())) == len(NAMES)
