"""Authentication: bearer tokens, by header or by a browser's cookie, and their scopes."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import Depends, Request, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.security.utils import get_authorization_scheme_param

from leyden.libs.contracts.api.tokens import ApiScope, Token
from leyden.libs.service import Problem
from leyden.libs.service.json_body import JsonRoute
from leyden.libs.store.access import find_token
from leyden.libs.store.database import Database
from leyden.services.api.refusals import PROBLEMS

FIRST_ADMIN = "first-admin"
INCLUDES: dict[ApiScope, frozenset[ApiScope]] = {
    ApiScope.ADMIN: frozenset(ApiScope),
    ApiScope.WRITE: frozenset({ApiScope.WRITE, ApiScope.READ, ApiScope.ATTEMPTS}),
    ApiScope.READ: frozenset({ApiScope.READ}),
    ApiScope.ATTEMPTS: frozenset({ApiScope.ATTEMPTS}),
}

# For the OpenAPI document alone: `GuardedRoute` has checked the header before.
_bearer = HTTPBearer(auto_error=False, description="A token of `POST /v1/tokens`, or the first administrator's.")
Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]


@dataclass(frozen=True)
class Caller:
    """The valid token of a request."""

    token_id: str
    scopes: list[ApiScope]
    name: str
    secret: str = field(repr=False)
    expires_at: datetime | None = None


class GuardedRoute(JsonRoute):
    """A route that checks the caller's token before it reads the body, so that a stranger cannot upload anything.

    Its documentation has the answers to wrong requests.
    """

    def __init__(
        self, path: str, endpoint: Callable[..., Any], *, responses: dict[int | str, Any] | None = None, **fields: Any
    ) -> None:
        super().__init__(path, endpoint, responses={**PROBLEMS, **(responses or {})}, **fields)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler that FastAPI calls."""
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            request.state.caller = await _identify(request)
            return await handle(request)

        return guarded


def require(scope: ApiScope) -> Callable[[Request, HTTPAuthorizationCredentials | None], Awaitable[str]]:
    """A dependency that checks the scope of the caller's token and returns the token's id."""

    async def caller(request: Request, _credentials: Credentials) -> str:
        known: Caller = request.state.caller
        if not any(scope in INCLUDES[given] for given in known.scopes):
            raise Problem(403, f"this needs a token with scope {scope}: ask an administrator for one", cause="scope")
        return known.token_id

    return caller


Reader = Annotated[str, Depends(require(ApiScope.READ))]
Writer = Annotated[str, Depends(require(ApiScope.WRITE))]
AgentClient = Annotated[str, Depends(require(ApiScope.ATTEMPTS))]
Admin = Annotated[str, Depends(require(ApiScope.ADMIN))]


async def _identify(request: Request) -> Caller:
    header = request.headers.get("authorization")
    cookie = request.cookies.get(cookie_name(request))
    if header is None and cookie:
        if request.method not in {"GET", "HEAD"}:
            check_origin(request)
        return await find_caller(request, cookie)
    scheme, secret = get_authorization_scheme_param(header)
    if scheme.lower() != "bearer" or not secret:
        raise _unauthorised("no bearer token: send `Authorization: Bearer TOKEN`")
    return await find_caller(request, secret)


async def find_caller(request: Request, secret: str) -> Caller:
    """The token with this secret. Raises: Problem: it is unknown or has ended"""
    first: str | None = request.app.state.first_admin_token
    if first is not None and hmac.compare_digest(secret.encode(), first.encode()):
        return Caller(FIRST_ADMIN, [ApiScope.ADMIN], FIRST_ADMIN, secret)
    database: Database = request.app.state.database
    async with database.read() as session:
        token: Token | None = await find_token(session, secret)
    if token is None:
        raise _unauthorised("the bearer token is unknown, expired or revoked: ask an administrator for a new one")
    return Caller(token.id, token.scopes, token.name, secret, token.expires_at)


def cookie_name(request: Request) -> str:
    """The cookie of a browser that has signed in; with the port, because browsers send cookies to every port."""
    return f"leyden_{request.url.port or 'session'}"


def keep_signed_in(request: Request, response: Response, secret: str, end: datetime | None) -> None:
    """Gives the browser the cookie of a token."""
    # The page's own address tells whether it came by TLS: a proxy may speak plain HTTP to this service.
    is_secure = request.headers.get("origin", "").startswith("https:")
    response.set_cookie(cookie_name(request), secret, httponly=True, samesite="strict", secure=is_secure, expires=end)


def check_origin(request: Request) -> None:
    """Refuses a request that a page of another address made the browser send with its cookie."""
    origin = urlsplit(request.headers.get("origin", "")).netloc
    if not origin or origin != request.headers.get("host"):
        raise Problem(403, "the page has another address: send `Authorization: Bearer TOKEN`", cause="origin")


def _unauthorised(detail: str) -> Problem:
    return Problem(401, detail, cause="token", headers={"www-authenticate": "Bearer"})
