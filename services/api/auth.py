"""Who asks: a bearer token and what it may do."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from libs.contracts.api import ApiScope, Token
from libs.service import Problem
from libs.store.access import find_token
from libs.store.database import Database

FIRST_ADMIN = "first-admin"
INCLUDES: dict[ApiScope, frozenset[ApiScope]] = {
    ApiScope.ADMIN: frozenset(ApiScope),
    ApiScope.WRITE: frozenset({ApiScope.WRITE, ApiScope.READ}),
    ApiScope.READ: frozenset({ApiScope.READ}),
}

_bearer = HTTPBearer(auto_error=False, description="A token of `POST /v1/tokens`, or the first administrator's.")
Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]


def require(scope: ApiScope) -> Callable[[Request, HTTPAuthorizationCredentials | None], Awaitable[str]]:
    """A dependency that gives the id of the caller's token once it is known to have the scope."""

    async def caller(request: Request, credentials: Credentials) -> str:
        if credentials is None:
            raise _unauthorised("no bearer token: send `Authorization: Bearer TOKEN`")
        token_id, scopes = await _identify(request, credentials.credentials)
        if not any(scope in INCLUDES[given] for given in scopes):
            raise Problem(403, f"this needs a token with scope {scope}: ask an administrator for one", cause="scope")
        return token_id

    return caller


Reader = Annotated[str, Depends(require(ApiScope.READ))]
Writer = Annotated[str, Depends(require(ApiScope.WRITE))]
Admin = Annotated[str, Depends(require(ApiScope.ADMIN))]


async def _identify(request: Request, secret: str) -> tuple[str, list[ApiScope]]:
    first: str | None = request.app.state.first_admin_token
    if first is not None and hmac.compare_digest(secret.encode(), first.encode()):
        return FIRST_ADMIN, [ApiScope.ADMIN]
    database: Database = request.app.state.database
    async with database.read() as session:
        token: Token | None = await find_token(session, secret)
    if token is None:
        raise _unauthorised("the bearer token is unknown or revoked: ask an administrator for a new one")
    return token.id, token.scopes


def _unauthorised(detail: str) -> Problem:
    return Problem(401, detail, cause="token", headers={"www-authenticate": "Bearer"})
