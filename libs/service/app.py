"""The application factory of every service with an HTTP port."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from leyden.libs.service.errors import on_http_exception, on_validation_error, unexpected_response
from leyden.libs.service.health import Checks
from leyden.libs.service.limits import BodyLimit
from leyden.libs.service.middleware import RequestContext

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]
ErrorHandler = Callable[[Request, Any], Awaitable[Response]]

DEFAULT_MAX_BODY_BYTES = 16 * 2**20

_ERROR_HANDLERS: dict[type[Exception], ErrorHandler] = {
    HTTPException: on_http_exception,
    RequestValidationError: on_validation_error,
}


def create_app(
    name: str,
    *,
    lifespan: Lifespan | None = None,
    checks: Checks | None = None,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    body_limits: Mapping[str, int] | None = None,
    error_handlers: Mapping[type[Exception], ErrorHandler] | None = None,
    unexpected: Callable[[Exception], Response] = unexpected_response,
    openapi_url: str | None = None,
    **fastapi: Any,
) -> FastAPI:
    """An application with error answers, request ids, logs, metrics and bounded bodies; the caller adds the routes.

    A lifespan may set `app.state.give_up`, a coroutine function: the server awaits it when a stop takes too long, and
    it ends the answers in progress.

    Args: checks: the checks of /readyz on the internal port, as `app.state.checks`; the lifespan may add to them;
        body_limits: path prefixes with a limit of their own;
        error_handlers: by exception type, over the problem answers that `HTTPException` (with `Problem`) and
            `RequestValidationError` get by default; the limits raise `Problem` 408, 413, 414 and 431;
        unexpected: the answer to an exception without a handler; the log has it already;
        fastapi: further arguments of FastAPI, such as `title` or `routes`.
    """
    fastapi.setdefault("title", f"leyden {name}")
    app = FastAPI(lifespan=lifespan, openapi_url=openapi_url, redirect_slashes=False, **fastapi)
    app.state.checks = checks if checks is not None else Checks()
    for error, handler in {**_ERROR_HANDLERS, **(error_handlers or {})}.items():
        app.add_exception_handler(error, handler)
    # The last added is the outermost.
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes, limits=body_limits or {})
    app.add_middleware(RequestContext, service=name, unexpected=unexpected)
    return app
