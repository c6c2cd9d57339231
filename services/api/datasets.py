"""Routes of datasets and their tasks."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import PurePath
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from starlette.datastructures import FormData, UploadFile
from starlette.requests import ClientDisconnect
from starlette.types import Message

from leyden.libs.contracts.api.body import Page
from leyden.libs.contracts.api.datasets import Dataset, Task
from leyden.libs.service import JsonResponse, Problem
from leyden.libs.store.access import StoredAnswer, recall_answer
from leyden.libs.store.datasets import (
    delete_dataset,
    find_dataset,
    list_datasets,
    list_tasks,
    stage_rows,
    store_dataset,
)
from leyden.services.api.audit import changing
from leyden.services.api.auth import Admin, GuardedRoute, Reader, Writer
from leyden.services.api.creation import IdempotencyKey, create_request, store_answer
from leyden.services.api.parameters import Cursor, Limit, Store
from leyden.services.api.settings import Settings
from leyden.services.api.upload import Limits, read_rows

router = APIRouter(prefix="/v1/datasets", tags=["datasets"], route_class=GuardedRoute)

CHUNK_BYTES = 65536
MAX_NAME_LENGTH = 200
NAME_PATTERN = r"^[\w][\w .:-]*$"
NAME = re.compile(rf"[\w][\w .:-]{{0,{MAX_NAME_LENGTH - 1}}}\Z")
Name = Annotated[
    str | None,
    Query(
        max_length=MAX_NAME_LENGTH,
        pattern=NAME_PATTERN,
        description="Name of the dataset; of a multipart upload also a field.",
    ),
]
_ROWS = {"type": "string", "description": "One JSON object per line, or one JSON array of objects."}
_BODY = {
    "required": True,
    "content": {
        "application/x-ndjson": {"schema": _ROWS},
        "application/json": {"schema": {"anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "object"}]}},
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "file": {"type": "string", "format": "binary"}},
                "required": ["file"],
            }
        },
    },
}


@router.post("", response_model=Dataset, status_code=201, openapi_extra={"requestBody": _BODY})
async def upload_dataset(
    request: Request, caller: Writer, name: Name = None, idempotency_key: IdempotencyKey = None
) -> Response:
    """Upload a dataset: JSON Lines or a JSON array, as the body or as `file` of a multipart form.

    Rows are stored as they arrive, in one transaction: a bad row is reported with its line and reason, and then nothing
    is stored. An equal upload under the same name answers 200 with the first one.
    """
    uploads: asyncio.Semaphore = request.app.state.uploads
    async with uploads:
        if request.headers.get("content-type", "").startswith("multipart/form-data"):
            settings: Settings = request.app.state.settings
            async with _form_of(request, settings.upload_silence_seconds) as form:
                file, given = form.get("file"), form.get("name")
                if not isinstance(file, UploadFile):
                    raise Problem(422, "the form has no file: send the rows in a field named `file`", cause="invalid")
                stem = PurePath(file.filename or "").stem
                chosen = name or _checked_name(given if isinstance(given, str) and given else stem)
                return await _store(request, caller, idempotency_key, chosen, _pieces(file))
        settings = request.app.state.settings
        chunks = _arriving(request, settings.upload_silence_seconds)
        return await _store(request, caller, idempotency_key, name, chunks)


def _checked_name(name: str) -> str:
    # FastAPI has checked a name in the address; this one stands in the form.
    if not NAME.match(name):
        raise Problem(
            422,
            f"the dataset cannot be called {name[:MAX_NAME_LENGTH]!r}: begin with a letter or digit, go on with those,"
            f" spaces, and . : - _, at most {MAX_NAME_LENGTH} characters",
            cause="invalid",
        )
    return name


async def _store(
    request: Request, caller: str, key: str | None, name: str | None, chunks: AsyncIterator[bytes]
) -> Response:
    if not name:
        raise Problem(422, "the dataset has no name: add ?name=NAME to the address", cause="invalid")
    settings: Settings = request.app.state.settings
    limits = Limits(settings.max_upload_bytes)
    async with changing(request) as change:
        session = change.session
        rows = await stage_rows(session, read_rows(chunks, limits))
        create = create_request(request, caller, key, name, rows.content_sha256)
        # Before the name is looked up: the first dataset may be deleted, and its name another one's.
        if key is not None and (first := await recall_answer(session, caller, key, create.digest)):
            change.is_new = False
            return JsonResponse(first.body, first.status_code, headers={"idempotency-replayed": "true"})
        stored = await store_dataset(session, name, rows)
        answer = StoredAnswer(201 if stored.created else 200, stored.dataset.model_dump(mode="json"))
        await store_answer(session, create, answer)
        change.is_new = stored.created
        change.made(stored.dataset)
    return JsonResponse(answer.body, answer.status_code)


@asynccontextmanager
async def _form_of(request: Request, silence_seconds: float) -> AsyncIterator[FormData]:
    """The form of the body, whose pieces must come as fast as those of a body without one."""

    async def receive() -> Message:
        async with asyncio.timeout(silence_seconds):
            return await request.receive()

    async with AsyncExitStack() as stack:
        try:
            parsing = Request(request.scope, receive).form(max_files=1, max_fields=4)
            form = await stack.enter_async_context(parsing)
        except TimeoutError:
            raise _silent(silence_seconds) from None
        yield form


def _silent(seconds: float) -> Problem:
    return Problem(408, f"nothing arrived for {seconds:g} s: send the upload again")


async def _arriving(request: Request, silence_seconds: float) -> AsyncIterator[bytes]:
    """Joins the client's chunks to pieces of at least `CHUNK_BYTES`, so that the parser runs once a piece."""
    piece = bytearray()
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(silence_seconds):
                chunk = await anext(stream, None)
        except TimeoutError:
            raise _silent(silence_seconds) from None
        except ClientDisconnect:
            raise Problem(400, "the sender went away") from None
        if chunk is not None:
            piece += chunk
        if piece and (chunk is None or len(piece) >= CHUNK_BYTES):
            yield bytes(piece)
            piece.clear()
        if chunk is None:
            return


async def _pieces(file: UploadFile) -> AsyncIterator[bytes]:
    while chunk := await file.read(CHUNK_BYTES):
        yield chunk


@router.get("")
async def get_datasets(
    store: Store, caller: Reader, name: str | None = None, cursor: Cursor = None, limit: Limit = 50
) -> Page[Dataset]:
    """List datasets, newest first."""
    async with store.read() as session:
        return await list_datasets(session, name=name, cursor=cursor, limit=limit)


@router.get("/{dataset_id}")
async def get_dataset(store: Store, caller: Reader, dataset_id: str) -> Dataset:
    """Show one dataset, by id or name."""
    async with store.read() as session:
        return await find_dataset(session, dataset_id)


@router.delete("/{dataset_id}", status_code=204)
async def remove_dataset(request: Request, caller: Admin, dataset_id: str) -> None:
    """Delete a dataset and its tasks, by id or name. 409 while a run uses it."""
    async with changing(request) as change:
        await delete_dataset(change.session, dataset_id)


@router.get("/{dataset_id}/tasks")
async def get_tasks(
    store: Store, caller: Reader, dataset_id: str, cursor: Cursor = None, limit: Limit = 100
) -> Page[Task]:
    """List the tasks of a dataset in the order of its upload."""
    async with store.read() as session:
        dataset = await find_dataset(session, dataset_id)
        return await list_tasks(session, dataset.id, cursor=cursor, limit=limit)
