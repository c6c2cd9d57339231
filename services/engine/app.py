"""The engine's HTTP application: it starts the engine's thread and stops it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError

from leyden.libs.service import JsonResponse, add_health
from leyden.libs.service.app import create_app
from leyden.libs.service.secrets import read_secret
from leyden.services.engine.auth import KeyCheck
from leyden.services.engine.engine import Engine
from leyden.services.engine.errors import BadRequest
from leyden.services.engine.routes import router
from leyden.services.engine.settings import Settings

_MAX_BODY_BYTES = 64 * 2**20


def create_engine_app(settings: Settings) -> FastAPI:
    """Loads the model in `settings.model_path` and returns an application that serves it.

    Raises:  UnsupportedModel, WeightsRefused: the folder cannot be served; SecretError: a key's file cannot be used
    """
    engine = Engine(settings)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await engine.stop()

    app = create_app(
        "engine",
        lifespan=lifespan,
        max_body_bytes=_MAX_BODY_BYTES,
        error_handlers={BadRequest: _on_bad_request, RequestValidationError: _on_invalid_body},
    )
    app.state.engine = engine
    app.state.checks.add("engine thread", lambda: _require_alive(engine))
    # Like SGLang, the main port serves the metrics, too.
    add_health(app)
    app.router.routes.extend(router.routes)
    app.add_middleware(
        KeyCheck,
        api_key=read_secret(settings.api_key, settings.api_key_file),
        admin_api_key=read_secret(settings.admin_api_key, settings.admin_api_key_file),
    )
    return app


async def _require_alive(engine: Engine) -> None:
    if not engine.alive:
        raise RuntimeError("the engine's thread has ended")


async def _on_bad_request(_request: Request, error: Exception) -> Response:
    return JsonResponse({"error": {"message": str(error), "type": "invalid_request_error", "code": 400}}, 400)


async def _on_invalid_body(_request: Request, error: Exception) -> Response:
    """Answers a malformed control request with 400 in SGLang's shape."""
    assert isinstance(error, RequestValidationError)
    message = "; ".join(f"{'.'.join(map(str, entry['loc']))}: {entry['msg']}" for entry in error.errors())
    return JsonResponse({"object": "error", "message": message, "type": "Bad Request", "code": 400}, 400)
