"""Sign-in of browsers: a token becomes a cookie that no script can read."""

from __future__ import annotations

import secrets
from datetime import timedelta

from fastapi import APIRouter, Request, Response

from leyden.libs.contracts.api.tokens import Session, SessionRequest, Token
from leyden.libs.contracts.ids import new_id
from leyden.libs.service import Problem
from leyden.libs.service.json_body import JsonRoute
from leyden.libs.store import access
from leyden.services.api.audit import changing
from leyden.services.api.auth import (
    FIRST_ADMIN,
    Caller,
    GuardedRoute,
    Reader,
    check_origin,
    cookie_name,
    find_caller,
    keep_signed_in,
)
from leyden.services.api.refusals import PROBLEMS

router = APIRouter(prefix="/v1/session", tags=["tokens"], route_class=JsonRoute, responses=PROBLEMS)
signed_in = APIRouter(prefix="/v1/session", tags=["tokens"], route_class=GuardedRoute)
"""For callers whose token was checked before."""

# The request's body or cookie holds the token.
_WITHOUT_BEARER = {"security": [dict[str, list[str]]()]}


@router.post("", openapi_extra=_WITHOUT_BEARER)
async def create_session(request: Request, response: Response, asked: SessionRequest) -> Session:
    """Sign a browser in: the answer sets a cookie that every operation accepts in place of the bearer token.

    An operation that changes something accepts the cookie only from a page of this address (the header `Origin`).
    """
    request.state.caller = caller = await find_caller(request, asked.token)
    secret, end = asked.token, caller.expires_at
    if asked.once:
        secret = f"leyden_{secrets.token_urlsafe(32)}"
        end = (await _replace(request, caller, secret)).expires_at
    keep_signed_in(request, response, secret, end)
    return Session(name=caller.name, scopes=caller.scopes, expires_at=end)


@signed_in.get("")
async def get_session(request: Request, caller: Reader) -> Session:
    """Show the rights of the caller's token, so that a page offers what they allow."""
    known: Caller = request.state.caller
    return Session(name=known.name, scopes=known.scopes, expires_at=known.expires_at)


async def _replace(request: Request, caller: Caller, secret: str) -> Token:
    if caller.token_id == FIRST_ADMIN:
        raise Problem(409, "the first administrator's token cannot be replaced: send `once` false", cause="state")
    if caller.expires_at is None:
        raise Problem(409, "a token without an end cannot be replaced: send `once` false", cause="state")
    async with changing(request) as change:
        # Its holder needs no further right for it, so that it must not live longer than what was lent.
        made = await access.rotate_token(
            change.session, caller.token_id, new_id("token"), secret, timedelta(), lives_anew=False
        )
        if made is None:
            raise Problem(401, "the link has signed in before: ask for a new one", cause="token")
        change.subject = caller.token_id
        change.made(made)
    return made


@router.delete("", status_code=204, openapi_extra=_WITHOUT_BEARER)
async def delete_session(request: Request, response: Response) -> None:
    """Sign a browser out: the answer removes the cookie; its token lives on. A repeat is harmless."""
    name = cookie_name(request)
    if name in request.cookies:
        check_origin(request)
    response.delete_cookie(name, httponly=True, samesite="strict")
