"""The internal application of a process, for health and metrics; Starlette's, because workers do without FastAPI."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from leyden.libs.service.health import Checks
from leyden.libs.service.problems import JsonResponse, on_http_exception
from leyden.libs.telemetry import exposition


def create_internal_app(checks: Checks) -> Starlette:
    """What the platform's own people and machines ask of a process: /healthz, /readyz and /metrics."""
    app = Starlette(exception_handlers={HTTPException: on_http_exception})
    app.router.redirect_slashes = False
    app.state.checks = checks
    add_health(app)
    return app


def add_health(app: Starlette) -> None:
    """Adds the three routes to an application whose `state.checks` says whether it is ready."""
    for path, answer in (("/healthz", _healthz), ("/readyz", _readyz), ("/metrics", _metrics)):
        app.add_route(path, answer, methods=["GET"], include_in_schema=False)


async def _healthz(_request: Request) -> Response:
    return JsonResponse({"status": "ok"})


async def _readyz(request: Request) -> Response:
    results = await request.app.state.checks.run()
    ready = all(result == "ok" for result in results.values())
    return JsonResponse({"status": "ok" if ready else "unavailable", "checks": results}, 200 if ready else 503)


async def _metrics(_request: Request) -> Response:
    body, content_type = exposition()
    return Response(body, media_type=content_type)
