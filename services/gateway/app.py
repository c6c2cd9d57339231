"""Builds the gateway's application; its lifespan opens and closes every connection and background task."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from leyden.libs.capability import KeyRing
from leyden.libs.contracts.config import DEFAULT_POOL
from leyden.libs.queue.attempt_liveness import AttemptLiveness
from leyden.libs.queue.notifications import Notifications
from leyden.libs.service import Budget, Overloaded, ShareUsed
from leyden.libs.service.app import create_app as create_service_app
from leyden.libs.service.quota import Amount, Limit
from leyden.libs.service.secrets import read_secret
from leyden.libs.store.database import Database
from leyden.libs.store.schema import check_schema
from leyden.services.gateway.auth import Authenticator
from leyden.services.gateway.azure import azure_routes
from leyden.services.gateway.calls.service import CallService
from leyden.services.gateway.dialects.base import WireFormat
from leyden.services.gateway.dialects.responses.compaction import Compaction
from leyden.services.gateway.dialects.responses.dialect import Responses
from leyden.services.gateway.dialects.responses.routes import RESPONSE_ROUTES
from leyden.services.gateway.embeddings.bundled import bundled_model
from leyden.services.gateway.embeddings.engines import EmbeddingPools
from leyden.services.gateway.embeddings.servers import Servers
from leyden.services.gateway.embeddings.service import Embeddings
from leyden.services.gateway.engine.client import EngineClient
from leyden.services.gateway.engine.pool import Endpoint, EnginePool
from leyden.services.gateway.errors import (
    BadRequest,
    GatewayError,
    NotServed,
    TooLarge,
    TooManyCalls,
    TooSlow,
    Unavailable,
    error_response,
)
from leyden.services.gateway.playground import PLAYGROUND_ROUTES, Playground
from leyden.services.gateway.prompt.models import PoolModels
from leyden.services.gateway.prompt.rendering import Renderer
from leyden.services.gateway.prompt.stored import StoredCalls
from leyden.services.gateway.prompt.template import ChatModel
from leyden.services.gateway.records.agent_objects import AgentObjects
from leyden.services.gateway.records.deliveries import Deliveries
from leyden.services.gateway.records.embeddings import EmbeddingSpans
from leyden.services.gateway.records.quotas import AttemptQuota
from leyden.services.gateway.records.reader import Reader
from leyden.services.gateway.records.writer import Recorder
from leyden.services.gateway.requests import at_both_bases
from leyden.services.gateway.routes import ANTHROPIC_ROUTES, GEMINI_ROUTES, OLLAMA_ROUTES, OPENAI_ROUTES
from leyden.services.gateway.samplers.provider import Providers
from leyden.services.gateway.settings import Settings

CLIENT = "leyden-gateway"


def create_app(settings: Settings) -> FastAPI:
    """Returns the application; its lifespan opens the connections."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with _running(app, settings):
            yield

    openai = [*OPENAI_ROUTES, *RESPONSE_ROUTES]
    app = create_service_app(
        "gateway",
        routes=[
            *at_both_bases([*openai, *ANTHROPIC_ROUTES, *OLLAMA_ROUTES, *GEMINI_ROUTES]),
            *at_both_bases(azure_routes(openai)),
            *PLAYGROUND_ROUTES,
        ],
        lifespan=lifespan,
        max_body_bytes=settings.max_body_bytes,
        error_handlers={
            GatewayError: _on_gateway_error,
            HTTPException: _on_http_exception,
            Overloaded: _on_overloaded,
            ShareUsed: _on_share_used,
        },
        unexpected=_on_unexpected,
    )
    app.add_middleware(_SingleSlashes)
    app.state.settings = settings
    # One body always fits.
    of_attempt = max(settings.max_body_bytes, settings.max_bytes_in_flight // 4)
    app.state.budget = Budget(settings.max_bytes_in_flight, client_bytes=of_attempt)
    return app


class _SingleSlashes:
    """Reads repeated slashes of a path as one: some clients append a path to a base URL that ends with a slash."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "//" in scope.get("path", ""):
            scope = {**scope, "path": re.sub("/+", "/", scope["path"])}
        await self._app(scope, receive, send)


@asynccontextmanager
async def _running(app: FastAPI, settings: Settings) -> AsyncIterator[None]:
    hold_seconds = settings.record_hold_seconds
    database = Database(settings.database_url, CLIENT, answer_seconds=settings.database_answer_seconds)
    notifications = Notifications(settings.redis_url)
    reader = Reader(database, hold_seconds=hold_seconds)
    # Its own connection: records never wait for a place in the pool.
    recording = Database(settings.database_url, CLIENT, pool_size=1, answer_seconds=min(10.0, hold_seconds))
    calls_quota = _calls_quota(settings)
    recorder = Recorder(recording, hold_seconds=hold_seconds, quota=calls_quota)
    delivering = Database(settings.database_url, CLIENT, pool_size=1, answer_seconds=min(10.0, hold_seconds))
    deliveries = Deliveries(delivering)
    pool, engines = _engines(settings, reader)
    providers = Providers(settings.providers, silence_seconds=settings.engine_silence_seconds)
    renderer = Renderer(settings.render_seconds)
    liveness = AttemptLiveness(
        database,
        notifications,
        hold_seconds=hold_seconds,
        has_calls=lambda key: calls.has_calls(key),
        on_end=lambda key: calls.end(key),
    )
    models = _models(settings, reader, renderer)
    stored = StoredCalls(reader, models.chat)
    calls = CallService(
        models,
        engines=engines,
        providers=providers,
        recorder=recorder,
        deliveries=deliveries,
        reader=reader,
        stored=stored,
        settings=settings,
        clock=liveness.clock.now,
    )
    app.state.agent_objects = AgentObjects(database, hold_seconds=hold_seconds, quota=_objects_quota(settings))
    app.state.responses = Responses(stored, app.state.agent_objects)
    app.state.compaction = Compaction(stored, app.state.agent_objects)
    app.state.reader = reader
    app.state.playground = Playground(models, engines)
    spans = EmbeddingSpans(database, hold_seconds=hold_seconds, quota=calls_quota)
    pools = _embedding_pools(settings, reader)
    app.state.embeddings = Embeddings(
        _servers(settings), pools, bundled_model(), spans, hold_seconds=settings.hold_seconds
    )
    app.state.calls, app.state.deliveries, app.state.give_up = calls, deliveries, calls.close
    app.state.auth = Authenticator(KeyRing(settings.capability_keys_file, liveness.clock.now), liveness)
    app.state.checks.add("store", database.ping)
    app.state.checks.add("schema", lambda: check_schema(database))
    await liveness.start()
    loops = [asyncio.create_task(work) for work in (pool.run(), recorder.run(), deliveries.run(), liveness.run())]
    try:
        yield
    finally:
        await calls.close()
        await recorder.drain()
        await deliveries.drain()
        for loop in loops:
            loop.cancel()
        await asyncio.wait(loops)
        renderer.close()
        await engines.close()
        await app.state.embeddings.close()
        await providers.close()
        await recording.close()
        await delivering.close()
        await notifications.close()
        await database.close()


def _engines(settings: Settings, reader: Reader) -> tuple[EnginePool, EngineClient]:
    """The pool of engines, which `run` keeps current, and its client, which `close` ends."""

    async def endpoints() -> list[Endpoint]:
        return [Endpoint(one.url.rstrip("/"), *one[1:]) for one in await reader.serving()]

    pool = EnginePool(endpoints, static_urls=settings.engine_urls, poll_seconds=settings.engine_poll_seconds)
    return pool, EngineClient(
        pool,
        api_key=read_secret(settings.engine_api_key, settings.engine_api_key_file),
        silence_seconds=settings.engine_silence_seconds,
        hold_seconds=settings.hold_seconds,
        newest_version=reader.newest_version,
    )


def _servers(settings: Settings) -> Servers:
    """The servers of embeddings, which `close` ends."""
    key = read_secret(settings.embeddings_api_key, settings.embeddings_api_key_file)
    return Servers(settings.embeddings_url, key, settings.providers)


def _embedding_pools(settings: Settings, reader: Reader) -> EmbeddingPools:
    """The pools that embed, which `close` ends."""
    return EmbeddingPools(reader.embedding_engines, read_secret(settings.engine_api_key, settings.engine_api_key_file))


def _models(settings: Settings, reader: Reader, renderer: Renderer) -> PoolModels:
    default = ChatModel(
        settings.model_path,
        context_length=settings.context_length,
        tool_parser=settings.tool_parsers.get(DEFAULT_POOL),
        reasoning_parser=settings.reasoning_parsers.get(DEFAULT_POOL),
    )
    return PoolModels(
        default,
        reader,
        history_bytes=settings.history_bytes,
        renderer=renderer,
        tool_parsers=settings.tool_parsers,
        reasoning_parsers=settings.reasoning_parsers,
    )


def _calls_quota(settings: Settings) -> AttemptQuota:
    """The limit of stored calls."""
    names = "GATEWAY_MAX_ATTEMPT_CALLS", "GATEWAY_MAX_ATTEMPT_CALL_BYTES"
    return AttemptQuota(Limit(Amount(settings.max_attempt_calls, settings.max_attempt_call_bytes), "calls", names))


def _objects_quota(settings: Settings) -> AttemptQuota:
    """The limit of objects of the Responses API."""
    names = "GATEWAY_MAX_ATTEMPT_OBJECTS", "GATEWAY_MAX_ATTEMPT_OBJECT_BYTES"
    most = Amount(settings.max_attempt_objects, settings.max_attempt_object_bytes)
    return AttemptQuota(Limit(most, "objects", names))


async def _on_gateway_error(request: Request, error: Any) -> Response:
    wire_format: WireFormat | None = getattr(request.state, "wire_format", None)
    return error_response(error, wire_format.error(error) if wire_format else None)


async def _on_overloaded(request: Request, _error: Any) -> Response:
    message = "The gateway is reading as many requests as it may; try again."
    return await _on_gateway_error(request, Unavailable(message, code="overloaded", retry_after_seconds=1))


async def _on_share_used(request: Request, _error: Any) -> Response:
    message = "The gateway is reading as many bytes of this attempt's requests as it may; wait for some of them."
    error = TooManyCalls(message, code="rate_limit_exceeded", retry_after_seconds=1)
    return await _on_gateway_error(request, error)


async def _on_http_exception(request: Request, error: Any) -> Response:
    """Converts errors of the framework and of the limits to the dialect's shape."""
    converted: GatewayError
    if error.status_code == 413:
        converted = TooLarge(f"{error.detail}.", code="body_too_large")
    elif error.status_code == 408:
        converted = TooSlow(f"{error.detail}.", code="body_too_slow")
    elif error.status_code in {400, 415}:
        converted = BadRequest(f"{error.detail}.", code="invalid_body")
        converted.status = error.status_code
    else:
        message = f"{error.detail}: the address is <base URL>/chat/completions, /responses, /messages or /models."
        converted = NotServed(message, code="not_found" if error.status_code == 404 else "method_not_allowed")
        converted.status = error.status_code
    response = await _on_gateway_error(request, converted)
    response.headers.update(error.headers or {})
    return response


def _on_unexpected(_error: Exception) -> Response:
    return error_response(GatewayError("An error of the gateway; it is logged under this answer's x-request-id."))
