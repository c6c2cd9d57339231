"""The collector's application: its lifespan owns the database and the group commit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import Counter
from starlette.exceptions import HTTPException

from leyden.libs.capability import CapabilityError, Cause, KeyRing
from leyden.libs.queue.attempt_liveness import AttemptLiveness
from leyden.libs.queue.notifications import Notifications
from leyden.libs.service import Budget, Overloaded, Problem
from leyden.libs.service.app import create_app, on_validation_error
from leyden.libs.service.errors import on_http_exception
from leyden.libs.store.database import Database, Refused, StoreAway
from leyden.libs.store.records.spans import AttemptEnded, RewardConflict
from leyden.libs.store.schema import check_schema
from leyden.services.collector.batch import telemetry_commit
from leyden.services.collector.components import Components
from leyden.services.collector.langsmith_routes import langsmith_router
from leyden.services.collector.places import Places
from leyden.services.collector.quotas import Quotas
from leyden.services.collector.routes import OVERLOADED, router, status_response
from leyden.services.collector.settings import Settings

REFUSED = Counter("collector_refused_requests", "Requests answered with an error of the collector's own.", ["cause"])


def create_collector(settings: Settings) -> FastAPI:
    """The collector as an ASGI application.

    Raises: KeyRingError: the key ring file cannot be read
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with _resources(app, settings):
            yield

    app = create_app(
        "collector",
        lifespan=lifespan,
        max_body_bytes=settings.max_body_bytes,
        error_handlers={
            HTTPException: _on_http_exception,
            RequestValidationError: _on_invalid,
            CapabilityError: _on_capability_error,
            Overloaded: _on_unavailable,
            StoreAway: _on_unavailable,
            Refused: _on_refused,
            AttemptEnded: _on_ended,
            RewardConflict: _on_conflict,
        },
    )
    app.state.settings = settings
    app.state.key_ring = KeyRing(settings.capability_keys_file)
    app.state.decoding = asyncio.Semaphore(1)
    app.state.budget = Budget(settings.max_bytes_in_flight)
    app.router.routes.extend(router.routes)
    app.router.routes.extend(langsmith_router.routes)
    return app


@asynccontextmanager
async def _resources(app: FastAPI, settings: Settings) -> AsyncIterator[None]:
    database = Database(
        settings.database_url,
        "leyden-collector",
        pool_size=settings.database_pool_size,
        answer_seconds=settings.database_answer_seconds,
    )
    commit = telemetry_commit(database, max_batch_rows=settings.max_batch_rows, write_seconds=settings.write_seconds)
    notifications = Notifications(settings.redis_url)
    liveness = AttemptLiveness(database, notifications)
    app.state.key_ring.clock = liveness.clock.now
    await liveness.start()
    app.state.commit, app.state.liveness = commit, liveness
    app.state.places, app.state.quotas = Places(database), Quotas(settings, database)
    app.state.components = Components(database)
    app.state.checks.add("database", database.ping)
    app.state.checks.add("schema", lambda: check_schema(database))
    writing = asyncio.create_task(commit.run(), name="group commit")
    asking = asyncio.create_task(liveness.run(), name="attempts")
    app.state.checks.add("writer", lambda: _alive(writing))
    server = None
    if settings.grpc_port is not None:
        # Imported late: it takes memory, and most agents speak HTTP.
        from leyden.services.collector.grpc import STOP_SECONDS, start_grpc

        server, app.state.grpc_port = await start_grpc(app.state, settings.host, settings.grpc_port)
    try:
        yield
    finally:
        if server is not None:
            await server.stop(STOP_SECONDS)
        for work in (writing, asking):
            work.cancel()
        await asyncio.wait((writing, asking))
        await notifications.close()
        await database.close()


async def _alive(task: asyncio.Task[None]) -> None:
    if task.done():
        raise RuntimeError("the group commit has ended")


async def _on_http_exception(request: Request, error: HTTPException) -> Response:
    cause = error.cause if isinstance(error, Problem) else None
    REFUSED.labels(cause or str(error.status_code)).inc()
    if _is_otlp(request):
        return status_response(request, error.status_code, error.detail, dict(error.headers or {}))
    return await on_http_exception(request, error)


async def _on_invalid(request: Request, error: RequestValidationError) -> Response:
    if not _is_otlp(request):
        return await on_validation_error(request, error)
    detail = "; ".join(f"{'.'.join(map(str, entry['loc']))}: {entry['msg']}" for entry in error.errors())
    return await _on_http_exception(request, Problem(422, detail, cause="invalid"))


def _is_otlp(request: Request) -> bool:
    return request.url.path.endswith(("/v1/traces", "/v1/logs"))


async def _on_capability_error(request: Request, error: CapabilityError) -> Response:
    return await _on_http_exception(request, Problem(error.status, str(error), cause=error.cause))


async def _on_unavailable(request: Request, error: StoreAway | Overloaded) -> Response:
    away = isinstance(error, StoreAway)
    problem = Problem(
        503,
        "the store cannot be reached: send again" if away else OVERLOADED,
        cause="store_away" if away else "overloaded",
        retry_after_seconds=1,
    )
    return await _on_http_exception(request, problem)


async def _on_refused(request: Request, error: Refused) -> Response:
    detail = f"the store cannot take these rows: {error}"
    return await _on_http_exception(request, Problem(400, detail, cause="refused"))


async def _on_ended(request: Request, _error: AttemptEnded) -> Response:
    """The attempt ended between the check of its key and the commit."""
    return await _on_capability_error(request, CapabilityError(Cause.ENDED))


async def _on_conflict(request: Request, error: RewardConflict) -> Response:
    return await _on_http_exception(request, Problem(409, str(error), cause="conflict"))
