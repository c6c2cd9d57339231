"""A door without FastAPI, whose layers cost a request a twentieth of a millisecond: for routes that read bodies alone.

`create_plain_app` is `app.create_app` on Starlette; both are furnished here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from leyden.libs.service.errors import on_http_exception, unexpected_response
from leyden.libs.service.health import Checks
from leyden.libs.service.limits import BodyLimit
from leyden.libs.service.middleware import RequestContext

Endpoint = Callable[[Request], Awaitable[Response]]
ErrorHandler = Callable[[Request, Any], Awaitable[Response]]
Unexpected = Callable[[Exception], Response]

DEFAULT_MAX_BODY_BYTES = 16 * 2**20


class PlainRoute(Route):
    """A route that is named in the scope of its requests, as FastAPI's are: metrics and spans say which one it was."""

    def __init__(self, path: str, endpoint: Endpoint, *, methods: Sequence[str]) -> None:
        super().__init__(path, endpoint, methods=methods)
        # Starlette's own would handle errors here, too, which a layer around all routes does.
        self.app = _answering(endpoint)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Whether the request is this route's, and what its scope gains."""
        match, found = super().matches(scope)
        if match is not Match.NONE:
            found["route"] = self
        return match, found


class _PlainApp(Starlette):
    """Starlette without its outermost layer: `RequestContext` answers what no handler knows."""

    def build_middleware_stack(self) -> ASGIApp:
        app: ASGIApp = ExceptionMiddleware(self.router, handlers=self.exception_handlers)
        for layer, arguments, keywords in reversed(self.user_middleware):
            app = layer(app, *arguments, **keywords)
        return app


def _answering(endpoint: Endpoint) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        response = await endpoint(Request(scope, receive, send))
        await response(scope, receive, send)

    return app


def create_plain_app(
    name: str,
    routes: Sequence[PlainRoute],
    *,
    lifespan: Callable[[Starlette], AbstractAsyncContextManager[None]],
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    error_handlers: Mapping[type[Exception], ErrorHandler] | None = None,
    unexpected: Unexpected = unexpected_response,
) -> Starlette:
    """A door with these routes, and otherwise as `app.create_app` makes it; see there for the arguments."""
    app = _PlainApp(routes=routes, lifespan=lifespan)
    app.router.redirect_slashes = False
    furnish(
        app,
        name,
        checks=Checks(),
        max_body_bytes=max_body_bytes,
        body_limits={},
        error_handlers={HTTPException: on_http_exception, **(error_handlers or {})},
        unexpected=unexpected,
    )
    return app


def furnish(
    app: Starlette,
    name: str,
    *,
    checks: Checks,
    max_body_bytes: int,
    body_limits: Mapping[str, int],
    error_handlers: Mapping[type[Exception], ErrorHandler],
    unexpected: Unexpected,
) -> None:
    """Gives an application its checks, error answers, request ids and bounds."""
    app.state.checks = checks
    for error, handler in error_handlers.items():
        app.add_exception_handler(error, handler)
    # The last added is the outermost.
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes, limits=body_limits)
    app.add_middleware(RequestContext, service=name, unexpected=unexpected)
