"""The application: routes, error answers, and what the lifespan owns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError

from leyden.libs.grading.pool import Pool
from leyden.libs.queue.notifications import Notifications
from leyden.libs.service import problem_response
from leyden.libs.service.app import ErrorHandler
from leyden.libs.service.app import create_app as create_service
from leyden.libs.service.volumes import Volumes
from leyden.libs.store.access import KeyReused
from leyden.libs.store.database import BadValue, Database, StoreAway
from leyden.libs.store.datasets import DatasetConflict, DatasetInUse, UnknownDataset
from leyden.libs.store.policies import UnknownPolicy
from leyden.libs.store.read.attempt_facts import RunPruned
from leyden.libs.store.read.groups import UnknownGroup
from leyden.libs.store.read.paging import BadCursor
from leyden.libs.store.read.runs import UnknownRun
from leyden.libs.store.read.views import RewardConflict, UnknownCall, UnknownRollout
from leyden.libs.store.records.artifacts import UnknownArtifact
from leyden.libs.store.runs.actions import ActionRefused, NoHeldOutDataset
from leyden.libs.store.runs.duels import DuelRefused
from leyden.libs.store.runs.feedback import FeedbackRefused, UnknownComponent
from leyden.libs.store.runs.regrades import RegradeRefused
from leyden.libs.store.runs.retention import RecordsInUse
from leyden.libs.store.runs.trials import NoGrader, TrialFailed
from leyden.libs.store.schema import check_schema
from leyden.services.api import access, audit, console_page, datasets, docs_page, platform, rollouts, runs, session
from leyden.services.api.attempts import routes as attempts
from leyden.services.api.attempts.context import attempt_context
from leyden.services.api.duels import routes as duels
from leyden.services.api.playground import routes as playground
from leyden.services.api.read import (
    alarms,
    call_tokens,
    causes,
    comparison,
    events,
    groups,
    tasks,
    trajectory,
    waiting,
    weights,
)
from leyden.services.api.refusals import on_refused
from leyden.services.api.settings import Settings
from leyden.services.api.upload import BadUpload, UploadTooLarge

DATABASE_SECONDS = 2
"""Retry-After of an answer while the database is away."""
GRADE_SECONDS = 5.0
MAX_UPLOADS = 4
"""Each holds a database connection for as long as its sender takes."""

_STATUSES: dict[type[Exception], tuple[int, str]] = {
    UnknownDataset: (404, "unknown"),
    UnknownRun: (404, "unknown"),
    UnknownGroup: (404, "unknown"),
    UnknownPolicy: (404, "unknown"),
    UnknownRollout: (404, "unknown"),
    UnknownArtifact: (404, "unknown"),
    UnknownCall: (404, "unknown"),
    DatasetConflict: (409, "conflict"),
    DatasetInUse: (409, "in_use"),
    RewardConflict: (409, "conflict"),
    FeedbackRefused: (409, "conflict"),
    RegradeRefused: (409, "conflict"),
    RunPruned: (409, "conflict"),
    UnknownComponent: (422, "unknown"),
    DuelRefused: (422, "invalid"),
    NoHeldOutDataset: (422, "invalid"),
    ActionRefused: (409, "state"),
    KeyReused: (422, "key_reused"),
    BadCursor: (400, "cursor"),
    BadUpload: (422, "invalid"),
    UploadTooLarge: (413, "too_large"),
    RecordsInUse: (503, "in_use"),
    NoGrader: (503, "no_grader"),
    TrialFailed: (500, "grader_failed"),
}


def create_app(settings: Settings) -> FastAPI:
    """The API; its lifespan opens and closes the database, the processes of graders, and Redis."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        database = Database(
            settings.database_url, "leyden-api", pool_size=10, answer_seconds=settings.database_answer_seconds
        )
        app.state.database = database
        app.state.graders = Pool(1, GRADE_SECONDS)
        app.state.notifications = Notifications(settings.redis_url)
        app.state.uploads = asyncio.Semaphore(MAX_UPLOADS)
        app.state.stopping = asyncio.Event()
        app.state.asking = set[str]()
        app.state.volumes = Volumes()
        app.state.checks.add("database", database.ping)
        app.state.checks.add("schema", lambda: check_schema(database))
        try:
            async with attempt_context(settings, database, app.state.notifications) as app.state.attempts:
                yield
        finally:
            await app.state.graders.close()
            await app.state.notifications.close()
            await database.close()

    app = create_service(
        "api",
        lifespan=lifespan,
        max_body_bytes=2**20,
        body_limits={"/v1/datasets": settings.max_upload_bytes + 2**16},
        error_handlers=_handlers(),
        openapi_url="/openapi.json",
        docs_url=None,
        redoc_url=None,
        title="Leyden",
        version="1",
        description="Datasets, runs and everything that rollouts left behind.",
    )
    app.state.settings = settings
    app.state.weight_store = settings.open_weight_store()
    app.state.first_admin_token = settings.first_admin_token()
    read = (alarms, call_tokens, causes, groups, comparison, events, tasks, trajectory, waiting, weights)
    modules = (datasets, runs, duels, attempts, playground, rollouts, *read, platform, access, session, audit)
    for router in (*(module.router for module in modules), session.signed_in, docs_page.router, console_page.router):
        # Why: `include_router` builds each route again at the application's first request, for 0.1 s of CPU time.
        app.router.routes.extend(router.routes)
    return app


def openapi_document() -> dict[str, Any]:
    """The OpenAPI document, without a database."""
    return create_app(Settings()).openapi()


def _handlers() -> dict[type[Exception], ErrorHandler]:
    handlers: dict[type[Exception], ErrorHandler] = dict.fromkeys(_STATUSES, _on_error)
    handlers[RequestValidationError] = on_refused
    handlers[StoreAway] = _on_database_away
    handlers[BadValue] = _on_bad_value
    return handlers


async def _on_error(_request: Request, error: Exception) -> Response:
    status, cause = _STATUSES[type(error)]
    extensions: dict[str, object] = {}
    if isinstance(error, BadUpload):
        extensions["errors"] = [problem.model_dump() for problem in error.problems]
    if isinstance(error, ActionRefused):
        extensions["allowed_actions"] = error.allowed
    return problem_response(status, str(error), cause=cause, extensions=extensions)


async def _on_database_away(_request: Request, _error: Exception) -> Response:
    return problem_response(
        503,
        "the database does not answer: try again, and see `leyden doctor`",
        cause="database",
        headers={"retry-after": str(DATABASE_SECONDS)},
    )


async def _on_bad_value(_request: Request, _error: Exception) -> Response:
    return problem_response(
        422, "a value cannot be stored: it holds the character U+0000 or a number out of range", cause="invalid"
    )
