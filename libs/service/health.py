"""Health and readiness of a process: named checks, the internal application that shows them, the supervisor's pipe."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from leyden.libs.service.errors import JsonResponse, on_http_exception
from leyden.libs.telemetry import exposition

Check = Callable[[], Awaitable[object]]

CHECK_SECONDS = 3.0
REPORT_SECONDS = 0.1
"""Time between two reports of a process that is not ready yet."""


class Checks:
    """The dependencies of a process; a check passes when it returns and fails when it raises.

    While `starting` is true the process is not ready, whatever its checks would say.
    """

    def __init__(self) -> None:
        self.starting = False
        self._checks: dict[str, Check] = {}

    def add(self, name: str, check: Check) -> None:
        """Adds a check, or replaces the one of that name."""
        self._checks[name] = check

    async def run(self) -> dict[str, str]:
        """`ok` or the cause of failure per check, in the order of `add`; all run together, each within 3 s."""
        if self.starting:
            return {"start": "not finished"}
        results = await asyncio.gather(*map(_outcome, self._checks.values()))
        return dict(zip(self._checks, results, strict=True))


async def _outcome(check: Check) -> str:
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            await check()
    except TimeoutError:
        return f"no answer within {CHECK_SECONDS:g} s"
    # A dependency may raise anything; the error is the finding.
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return "ok"


def create_internal_app(checks: Checks) -> Starlette:
    """The application of the internal port: /healthz, /readyz and /metrics."""
    app = Starlette(exception_handlers={HTTPException: on_http_exception})
    app.router.redirect_slashes = False
    app.state.checks = checks
    add_health(app)
    return app


def add_health(app: Starlette) -> None:
    """Adds the three routes to an application whose `state.checks` knows its readiness."""
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


async def report_readiness(descriptor: int | None, checks: Checks) -> None:
    """Writes the results of the checks as a line of JSON whenever they change, and returns once all are `ok`.

    A pipe names this process; over a socket that several processes share, another one might answer.

    Args: descriptor: the writing end of a supervisor's pipe, closed at the end; None without a supervisor
    """
    if descriptor is None:
        return
    os.set_inheritable(descriptor, False)
    reported: dict[str, str] | None = None
    # Without its supervisor the process has no reader, and dies soon.
    with contextlib.suppress(BrokenPipeError), os.fdopen(descriptor, "w", encoding="utf-8") as pipe:
        while True:
            results = await checks.run()
            if results != reported:
                pipe.write(json.dumps(results) + "\n")
                pipe.flush()
            if all(result == "ok" for result in results.values()):
                return
            reported = results
            await asyncio.sleep(REPORT_SECONDS)
