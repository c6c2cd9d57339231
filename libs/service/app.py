"""The application factory of every service with an HTTP port."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from leyden.libs.service.errors import on_http_exception, problem_response, unexpected_response
from leyden.libs.service.health import Checks
from leyden.libs.service.limits import Limits, RequestLimits
from leyden.libs.service.middleware import RequestContext

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]
ErrorHandler = Callable[[Request, Any], Coroutine[Any, Any, Response]]

DEFAULT_MAX_BODY_BYTES = 16 * 2**20


def create_app(
    name: str,
    *,
    lifespan: Lifespan | None = None,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    body_limits: Mapping[str, int] | None = None,
    error_handlers: Mapping[type[Exception], ErrorHandler] | None = None,
    unexpected: Callable[[Exception], Response] = unexpected_response,
    **fastapi: Any,
) -> FastAPI:
    """An application with error answers, request ids, logs, metrics and bounded bodies; the caller adds the routes.

    `app.state.checks` holds the checks of /readyz on the internal port; the lifespan adds to them. A lifespan may set
    `app.state.give_up`, a coroutine function: the server awaits it when a stop takes too long, and it ends the answers
    in progress.

    Args: body_limits: path prefixes with a limit of their own;
        error_handlers: by exception type, over the problem answers that `HTTPException` (with `Problem`) and
            `RequestValidationError` get by default; the limits raise `Problem` 408 and 413;
        unexpected: the answer to an exception without a handler; the log has it already;
        fastapi: further arguments of FastAPI, such as `title` or `routes`.
    """
    handlers: dict[Any, ErrorHandler] = {
        HTTPException: on_http_exception,
        RequestValidationError: on_validation_error,
        **(error_handlers or {}),
    }
    defaults = {"title": f"leyden {name}", "openapi_url": None, "redirect_slashes": False}
    app = FastAPI(lifespan=lifespan, exception_handlers=handlers, **{**defaults, **fastapi})
    app.state.checks, app.state.limits = Checks(), Limits()
    # The last added is the outermost.
    app.add_middleware(RequestLimits, max_bytes=max_body_bytes, limits=body_limits or {})
    app.add_middleware(RequestContext, service=name, unexpected=unexpected)
    return app


async def on_validation_error(_request: Request, error: RequestValidationError) -> Response:
    """422 with one entry per wrong field: its path and the fault. The answer never repeats the value."""
    fields = [{"path": ".".join(map(str, entry["loc"])), "message": entry["msg"]} for entry in error.errors()]
    detail = "; ".join(f"{field['path']}: {field['message']}" for field in fields[:5])
    return problem_response(422, detail, cause="invalid", extensions={"errors": fields})
