"""The gateway's application; its lifespan opens and closes everything it owns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from leyden.libs.capability import KeyRing
from leyden.libs.queue.attempt_liveness import AttemptLiveness
from leyden.libs.queue.notifications import Notifications
from leyden.libs.service import Budget, Overloaded
from leyden.libs.service.plain import create_plain_app
from leyden.libs.service.secrets import read_secret
from leyden.libs.store.calls import CallWriter, QuickReader
from leyden.libs.store.database import Database
from leyden.services.gateway.connection import Connections
from leyden.services.gateway.door import Doors
from leyden.services.gateway.engines import Directory
from leyden.services.gateway.errors import GatewayError, NotServed, TooLarge, Unavailable, error_response
from leyden.services.gateway.forward import Gateway
from leyden.services.gateway.history import History
from leyden.services.gateway.reading import Reader
from leyden.services.gateway.record import Recorder
from leyden.services.gateway.render import ChatModel
from leyden.services.gateway.routes import ROUTES
from leyden.services.gateway.sample import Sampler
from leyden.services.gateway.settings import Settings

CLIENT = "leyden-gateway"


def create_app(settings: Settings) -> Starlette:
    """The application; nothing is opened before its lifespan begins."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with _opened(app, settings):
            yield

    app = create_plain_app(
        "gateway",
        ROUTES,
        lifespan=lifespan,
        max_body_bytes=settings.max_body_bytes,
        error_handlers={
            GatewayError: _on_gateway_error,
            HTTPException: _on_http_exception,
            Overloaded: _on_overloaded,
        },
        unexpected=_on_unexpected,
    )
    app.state.budget = Budget(settings.max_bytes_in_flight)
    return app


@asynccontextmanager
async def _opened(app: Starlette, settings: Settings) -> AsyncIterator[None]:
    engine_key = read_secret(settings.engine_api_key, settings.engine_api_key_file)
    model = ChatModel(settings.model_path, context_length=settings.context_length)
    database = Database(settings.database_url, CLIENT, answer_seconds=settings.database_answer_seconds)
    notifications = Notifications(settings.redis_url)
    # Calls may be locked where engines are not.
    engines, calls = (
        QuickReader(settings.database_url, CLIENT, timeout_seconds=settings.database_answer_seconds) for _ in range(2)
    )
    reader = Reader(database, engines, calls, hold_seconds=settings.record_hold_seconds)
    directory = Directory(reader.endpoints, static_urls=settings.engine_urls, poll_seconds=settings.engine_poll_seconds)
    writer = CallWriter(settings.database_url, CLIENT, timeout_seconds=min(10.0, settings.record_hold_seconds))
    recorder = Recorder(writer, hold_seconds=settings.record_hold_seconds)
    with closing(Connections(silence_seconds=settings.engine_silence_seconds)) as connections:
        gateway = Gateway(
            model,
            history=History(model, max_bytes=settings.history_bytes),
            sampler=Sampler(connections, directory, api_key=engine_key, hold_seconds=settings.hold_seconds),
            recorder=recorder,
            reader=reader,
            max_choices=settings.max_choices,
            max_calls=settings.max_calls,
            max_calls_per_attempt=settings.max_calls_per_attempt,
            hold_seconds=settings.hold_seconds,
        )
        app.state.gateway, app.state.settings, app.state.give_up = gateway, settings, gateway.close
        liveness = AttemptLiveness(
            database, notifications, hold_seconds=settings.record_hold_seconds, on_end=gateway.end
        )
        app.state.doors = Doors(KeyRing(settings.capability_keys_file), liveness)
        app.state.checks.add("store", database.ping)
        loops = [asyncio.create_task(work) for work in (directory.run(), recorder.run(), liveness.run())]
        try:
            yield
        finally:
            await gateway.close()
            await recorder.drain()
            for loop in loops:
                loop.cancel()
            await asyncio.wait(loops)
            await writer.close()
            await engines.close()
            await calls.close()
            await notifications.close()
            await database.close()


async def _on_gateway_error(_request: Request, error: Any) -> Response:
    return error_response(error)


async def _on_overloaded(_request: Request, _error: Any) -> Response:
    message = "The gateway is reading as many requests as it may; try again."
    return error_response(Unavailable(message, code="overloaded", retry_after_seconds=1))


async def _on_http_exception(_request: Request, error: Any) -> Response:
    """What the framework and the body limit raise, in OpenAI's shape."""
    if error.status_code == 413:
        response = error_response(TooLarge(f"{error.detail}.", code="body_too_large"))
    else:
        message = f"{error.detail}: the address is <base URL>/chat/completions or <base URL>/models."
        refused = NotServed(message, code="not_found" if error.status_code == 404 else "method_not_allowed")
        refused.status = error.status_code
        response = error_response(refused)
    response.headers.update(error.headers or {})
    return response


def _on_unexpected(_error: Exception) -> Response:
    return error_response(GatewayError("An error of the gateway; it is logged under this answer's x-request-id."))
