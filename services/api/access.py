"""Routes of bearer tokens."""

from __future__ import annotations

import base64
import hmac
import secrets
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

from fastapi import APIRouter, Request, Response

from leyden.libs.contracts.api.body import Page
from leyden.libs.contracts.api.tokens import IssuedToken, RotateRequest, Token, TokenRequest
from leyden.libs.contracts.ids import new_id
from leyden.libs.service import Problem
from leyden.libs.store import access
from leyden.libs.store.database import Session
from leyden.services.api.audit import changing
from leyden.services.api.auth import Admin, Caller, GuardedRoute, cookie_name, keep_signed_in
from leyden.services.api.creation import Create, IdempotencyKey, create_request, store_answer
from leyden.services.api.parameters import Store

router = APIRouter(prefix="/v1/tokens", tags=["tokens"], route_class=GuardedRoute)


@router.post("", status_code=201)
async def create_token(
    request: Request, asked: TokenRequest, caller: Admin, idempotency_key: IdempotencyKey = None
) -> IssuedToken:
    """Make a bearer token. Its secret is in this answer alone; only a repeat with the same key shows it again.

    409 for a repeat by the first administrator, whose own token has changed since: the secret is lost.
    """
    life = asked.expires_seconds
    end = None if life is None else datetime.now(UTC) + timedelta(seconds=life)

    async def issue(session: Session, secret: str) -> Token:
        return await access.add_token(session, new_id("token"), asked.name, secret, asked.scopes, end)

    return await _issue_once(request, create_request(request, caller, idempotency_key, asked), issue)


@router.post("/{token_id}/rotate", status_code=201)
async def rotate_token(
    request: Request,
    response: Response,
    caller: Admin,
    token_id: str,
    asked: RotateRequest | None = None,
    idempotency_key: IdempotencyKey = None,
) -> IssuedToken:
    """Replace a token: the answer is a new one with its name, scopes and life; the old one ends, after the grace.

    A browser that is signed in with that token stays signed in: the answer sets its cookie anew.
    409 for a token that has ended or was rotated before; only a repeat with the same key shows the secret again, or
    409 where the first administrator's own token has changed since.
    """
    asked = asked or RotateRequest()

    async def issue(session: Session, secret: str) -> Token:
        grace = timedelta(seconds=asked.grace_seconds)
        made = await access.rotate_token(session, token_id, new_id("token"), secret, grace)
        if made is None:
            message = f"token {token_id!r} is unknown, has ended, or was rotated: list tokens to find its successor"
            raise Problem(409, message, cause="state")
        return made

    issued = await _issue_once(request, create_request(request, caller, idempotency_key, asked), issue)
    known: Caller = request.state.caller
    if token_id == caller and request.cookies.get(cookie_name(request)) == known.secret:
        keep_signed_in(request, response, issued.token, issued.expires_at)
    return issued


async def _issue_once(
    request: Request, create: Create, issue: Callable[[Session, str], Awaitable[Token]]
) -> IssuedToken:
    """A new token and its secret; a repeated key gets the first one.

    Raises: Problem: the caller signs in with another secret than when it sent the key first, so that nobody can compute
        the token's again
    """
    secret = _secret(request, create)
    async with changing(request) as change:
        stored = None
        if create.key is not None:
            stored = await access.recall_answer(change.session, create.caller, create.key, create.digest)
        change.is_new = stored is None
        if stored is None:
            token = await issue(change.session, secret)
            change.made(token)
            stored = access.StoredAnswer(201, token.model_dump(mode="json"))
            await store_answer(change.session, create, stored)
        elif not await access.has_secret(change.session, stored.body["id"], secret):
            message = (
                f"this request made token {stored.body['id']!r} when the caller signed in with another secret, and the"
                " token's own cannot be shown again: rotate that token with a new Idempotency-Key"
            )
            raise Problem(409, message, cause="state")
    return IssuedToken(**stored.body, token=secret)


def _secret(request: Request, create: Create) -> str:
    """A random secret, or for a request with an idempotency key one that a repeat computes again.

    The computed one is the HMAC of the request under the caller's token. The database stores neither.
    """
    if create.key is None:
        return f"leyden_{secrets.token_urlsafe(32)}"
    caller: Caller = request.state.caller
    derived = hmac.digest(f"Bearer {caller.secret}".encode(), create.key.encode() + create.digest, "sha256")
    return f"leyden_{base64.urlsafe_b64encode(derived).decode().rstrip('=')}"


@router.get("")
async def list_tokens(store: Store, caller: Admin) -> Page[Token]:
    """List tokens, newest first, without their secrets."""
    async with store.read() as session:
        return Page(items=await access.list_tokens(session))


@router.delete("/{token_id}", status_code=204)
async def revoke_token(request: Request, token_id: str, caller: Admin) -> None:
    """Revoke a token; a repeat changes nothing."""
    async with changing(request) as change:
        revoked = await access.revoke_token(change.session, token_id)
        if revoked is None:
            raise Problem(404, f"no token has the id {token_id!r}: list tokens to find it", cause="unknown")
        change.is_new = revoked
