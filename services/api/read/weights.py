"""Routes of the files of a policy version: their list, and the folder as a streamed archive.

The API reads the trainer's folder where it sees that, and the object store otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path as Folder
from typing import Annotated, NamedTuple, cast

from fastapi import APIRouter, Depends, Path, Request
from fastapi.responses import StreamingResponse

from leyden.libs.contracts.api.runs import VersionFile, VersionFiles
from leyden.libs.service import Problem
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.read import runs
from leyden.libs.weights import Damaged, NotPublished, StoredFile, StoreUnusable, VersionKey, WeightStore
from leyden.services.api.auth import GuardedRoute, Reader
from leyden.services.api.parameters import MAX_NUMBER, PolicyName, Store
from leyden.services.api.read.archive import (
    File,
    UnsafeFile,
    archive_bytes,
    open_archive,
    stored_archive,
    version_files,
)

router = APIRouter(prefix="/v1/runs/{run_id}/policies/{number}", tags=["runs"], route_class=GuardedRoute)

Number = Annotated[int, Path(ge=0, le=MAX_NUMBER)]
ELSEWHERE = "run `leyden policy export` where the trainer writes, or with --context of the cluster"


class _Unreadable(Exception):
    """Why this machine has no files of the version, with the remedy."""


class _Readable(NamedTuple):
    """The files of a version, and their archive, once it is opened."""

    files: Sequence[File | StoredFile]
    open: Callable[[], Iterator[bytes]]


def _store_of(request: Request) -> WeightStore | None:
    return cast("WeightStore | None", request.app.state.weight_store)


Published = Annotated[WeightStore | None, Depends(_store_of)]


@router.get("/files")
async def get_version_files(
    store: Store, published: Published, caller: Reader, run_id: str, number: Number, policy: PolicyName = None
) -> VersionFiles:
    """List the files of a policy version, or say why the API cannot read them."""
    row = await _version(store, run_id, policy, number)
    listed, reason = None, None
    try:
        found = await asyncio.to_thread(_find, row, published)
        listed = [VersionFile(name=one.name, size_bytes=one.size_bytes) for one in found.files]
    except (_Unreadable, StoreUnusable) as error:
        reason = str(error)
    return VersionFiles(version=number, content_sha256=row.content_sha256, files=listed, reason=reason)


@router.get("/weights", response_class=StreamingResponse, responses={200: {"content": {"application/x-tar": {}}}})
async def get_weights(
    store: Store, published: Published, caller: Reader, run_id: str, number: Number, policy: PolicyName = None
) -> StreamingResponse:
    """Download a policy version: its Hugging Face folder as a tar, in a stream, from the trainer's folder or from the
    object store. 409 where the API has no files, 503 where the store does not answer.
    """
    row = await _version(store, run_id, policy, number)
    try:
        found = await asyncio.to_thread(_find, row, published)
        stream = await asyncio.to_thread(found.open)
    except StoreUnusable as error:
        raise Problem(503, str(error), cause="store") from error
    except (_Unreadable, OSError) as error:
        raise Problem(409, str(error), cause="files") from error
    headers = {
        "content-length": str(archive_bytes(found.files)),
        "content-disposition": f'attachment; filename="{row.run_id}-version-{number}.tar"',
        "etag": f'"{row.content_sha256}"',
    }
    return StreamingResponse(stream, media_type="application/x-tar", headers=headers)


async def _version(store: Database, run_id: str, policy: str | None, version: int) -> tables.PolicyVersion:
    async with store.read() as session:
        policy_id = await runs.policy_id(session, run_id, policy)
        row = await session.get(tables.PolicyVersion, (policy_id, version))
    if row is None:
        raise Problem(404, f"run {run_id} has no version {version}: list its versions", cause="unknown")
    return row


def _find(row: tables.PolicyVersion, published: WeightStore | None) -> _Readable:
    """Raises: _Unreadable; StoreUnusable"""
    if row.pruned_at is not None:
        raise _Unreadable(f"the files of version {row.version} were removed: training.keep_checkpoints keeps more")
    try:
        files = _files(row)
    except _Unreadable as error:
        if published is None:
            raise
        return _published(row, published, str(error))
    return _Readable(files, lambda: open_archive(files))


def _published(row: tables.PolicyVersion, published: WeightStore, elsewhere: str) -> _Readable:
    """Args: elsewhere: why the trainer's folder is of no use"""
    key = VersionKey(row.run_id, row.version, row.content_sha256)
    try:
        files = published.manifest(key).files
    except NotPublished as error:
        raise _Unreadable(f"{error}, and {elsewhere}") from error
    except Damaged as error:
        raise _Unreadable(str(error)) from error
    return _Readable(files, lambda: stored_archive(published, key, files))


def _files(row: tables.PolicyVersion) -> list[File]:
    try:
        found = version_files(Folder(row.path))
    except FileNotFoundError:
        raise _Unreadable(f"the API's machine has no folder {row.path}: {ELSEWHERE}") from None
    except (UnsafeFile, OSError) as error:
        raise _Unreadable(f"the API cannot read {row.path}: {error}") from error
    if not found:
        raise _Unreadable(f"{row.path} is empty on the API's machine: {ELSEWHERE}")
    return found
