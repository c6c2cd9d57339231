"""Creates happen once: the answer to an Idempotency-Key is stored in the transaction that made it, for a week."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Header, Request, Response
from pydantic import BaseModel

from leyden.libs.contracts.api.runs import Run
from leyden.libs.contracts.ids import run_of
from leyden.libs.faults import fault_point
from leyden.libs.service import JsonResponse
from leyden.libs.store.access import StoredAnswer, add_answer, recall_answer
from leyden.libs.store.database import Session
from leyden.services.api.audit import changing

IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=255,
        description="The same key with the same request gets the first answer and creates nothing, for seven days; with"
        " another, 422.",
    ),
]


@dataclass(frozen=True)
class Create:
    """One create request: the caller's token, the idempotency key, and the digest of the request.

    The same key with another digest is a reuse of the key, not a repeat of the request.
    """

    caller: str
    key: str | None
    digest: bytes


def create_request(request: Request, caller: str, key: str | None, *parts: BaseModel | str) -> Create:
    """The identity of a create request: its digest covers method, path and body."""
    digest = hashlib.sha256(f"{request.method} {request.url.path}".encode())
    for part in parts:
        digest.update(b"\0" + (part if isinstance(part, str) else part.model_dump_json()).encode())
    return Create(caller, key, digest.digest())


async def create_once(
    request: Request, create: Create, work: Callable[[Session], Awaitable[tuple[BaseModel, bool]]]
) -> Response:
    """201 with what `work` made, 200 when it found an equal thing, or the first answer again for a repeated key.

    Raises: KeyReused: the key came with another request
    """
    async with changing(request) as change:
        session = change.session
        if create.key is not None:
            stored = await recall_answer(session, create.caller, create.key, create.digest)
            if stored is not None:
                change.is_new = False
                return _replayed(stored)
        made, is_new = await work(session)
        change.is_new = is_new
        change.made(made)
        body = made.model_dump(mode="json", by_alias=True)
        answer = StoredAnswer(201 if is_new else 200, body, _run_of(request, made))
        await store_answer(session, create, answer)
        fault_point("api.created")
    fault_point("api.committed")
    return JsonResponse(answer.body, answer.status_code)


def _run_of(request: Request, made: BaseModel) -> str | None:
    """The run of a new thing: a new run itself, else the one in the address."""
    if isinstance(made, Run):
        return made.id
    address = request.path_params.get("run_id") or request.path_params.get("rollout_id")
    return None if address is None else run_of(address)


async def recall_first(request: Request, create: Create) -> Response | None:
    """The first answer for a repeated key, where much is done before `create_once`; None for a new key.

    Raises: KeyReused: the key came with another request
    """
    if create.key is None:
        return None
    async with changing(request) as change:
        change.is_new = False
        stored = await recall_answer(change.session, create.caller, create.key, create.digest)
    return None if stored is None else _replayed(stored)


async def store_answer(session: Session, create: Create, answer: StoredAnswer) -> None:
    """Stores the answer to a request with a key."""
    if create.key is not None:
        await add_answer(session, create.caller, create.key, create.digest, answer)


def _replayed(stored: StoredAnswer) -> Response:
    return JsonResponse(stored.body, stored.status_code, headers={"idempotency-replayed": "true"})
