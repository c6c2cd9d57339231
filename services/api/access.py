"""Routes of bearer tokens."""

from __future__ import annotations

import base64
import hmac
import secrets

from fastapi import APIRouter, Request, Response

from leyden.libs.contracts import api
from leyden.libs.contracts.ids import new_id
from leyden.libs.service import JsonResponse, Problem
from leyden.libs.store import access
from leyden.services.api.auth import Admin, GuardedRoute
from leyden.services.api.creation import Create, IdempotencyKey, create_request, store_answer
from leyden.services.api.parameters import Store

router = APIRouter(prefix="/v1/tokens", tags=["tokens"], route_class=GuardedRoute)


@router.post("", response_model=api.IssuedToken, status_code=201)
async def create_token(
    request: Request, asked: api.TokenRequest, caller: Admin, store: Store, idempotency_key: IdempotencyKey = None
) -> Response:
    """Make a bearer token. Its secret is in this answer alone; only a repeat with the same key shows it again."""
    create = create_request(request, caller, idempotency_key, asked)
    secret = _secret(request, create)
    async with store.session() as session:
        stored = None
        if create.key is not None:
            stored = await access.recall_answer(session, caller, create.key, create.digest)
        if stored is None:
            token = await access.add_token(session, new_id("token"), asked.name, secret, asked.scopes)
            stored = access.StoredAnswer(201, token.model_dump(mode="json"))
            await store_answer(session, create, stored)
    return JsonResponse({**stored.body, "token": secret}, stored.status_code)


def _secret(request: Request, create: Create) -> str:
    """A random secret, or for a request with an idempotency key one that a repeat computes again.

    The computed one is the HMAC of the request under the caller's bearer token. The database stores neither.
    """
    if create.key is None:
        return f"leyden_{secrets.token_urlsafe(32)}"
    derived = hmac.digest(request.headers["authorization"].encode(), create.key.encode() + create.digest, "sha256")
    return f"leyden_{base64.urlsafe_b64encode(derived).decode().rstrip('=')}"


@router.get("")
async def list_tokens(store: Store, caller: Admin) -> api.Page[api.Token]:
    """List tokens, newest first, without their secrets."""
    async with store.read() as session:
        return api.Page(items=await access.list_tokens(session))


@router.delete("/{token_id}", status_code=204)
async def revoke_token(store: Store, token_id: str, caller: Admin) -> None:
    """Revoke a token; a repeat changes nothing."""
    async with store.session() as session:
        found = await access.revoke_token(session, token_id)
    if not found:
        raise Problem(404, f"no token has the id {token_id!r}: list tokens to find it", cause="unknown")
