"""The door of a process: the HTTP application that others use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from leyden.libs.service.health import Checks
from leyden.libs.service.plain import DEFAULT_MAX_BODY_BYTES, ErrorHandler, Unexpected, furnish
from leyden.libs.service.problems import on_http_exception, on_validation_error, unexpected_response

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]

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
    unexpected: Unexpected = unexpected_response,
    openapi_url: str | None = None,
    **fastapi: Any,
) -> FastAPI:
    """A door: an application with problem answers, request ids and a bounded body, and no routes but those added to it.

    A lifespan may set `app.state.give_up`: awaited when a stop has lasted for too long, it ends the answers in hand.

    Args: checks: what /readyz of the internal port runs, kept in `app.state.checks`; the lifespan may add to it;
        body_limits: path prefixes with a limit of their own;
        error_handlers: by exception type, over the problem answers that `HTTPException` (with `Problem`) and
            `RequestValidationError` get by default;
        unexpected: the answer to an exception without a handler; it is logged before;
        fastapi: further arguments of FastAPI, such as `title`.
    """
    fastapi.setdefault("title", f"leyden {name}")
    app = FastAPI(lifespan=lifespan, openapi_url=openapi_url, redirect_slashes=False, **fastapi)
    furnish(
        app,
        name,
        checks=checks if checks is not None else Checks(),
        max_body_bytes=max_body_bytes,
        body_limits=body_limits or {},
        error_handlers={**_ERROR_HANDLERS, **(error_handlers or {})},
        unexpected=unexpected,
    )
    return app
