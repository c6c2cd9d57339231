"""Request ids, spans, logs and metrics, as pure ASGI middleware: it buffers nothing, so streams leave as they come."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Callable

from prometheus_client import Histogram
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from leyden.libs.service.errors import problem_response
from leyden.libs.telemetry import SECONDS_BUCKETS, bind, logger, span

QUIET_PATHS = frozenset({"/", "/healthz", "/readyz", "/metrics"})
"""Neither logged nor measured: probes request them all day long."""
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}")

_STOPPING = problem_response(503, "the process is stopping: try again", cause="stopping", headers={"retry-after": "1"})

log = logger()

REQUEST_SECONDS = Histogram(
    "leyden_http_request_seconds",
    "Time from a request's headers to the end of its answer.",
    ["service", "method", "route", "status"],
    buckets=SECONDS_BUCKETS,
)


class RequestContext:
    """Binds request id and trace id to logs, continues the caller's trace, logs and measures the answer.

    An exception without a handler ends here: this logs it once and sends the answer of `unexpected`. Once the answer
    has started, it raises the exception on, and the server cuts the connection. A request that a stop of the process
    cancels gets 503. Logs show paths without their query.
    """

    def __init__(self, app: ASGIApp, *, service: str, unexpected: Callable[[Exception], Response]) -> None:
        self._app = app
        self._service = service
        self._unexpected = unexpected

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in QUIET_PATHS:
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        asked = Headers(scope=scope)
        given = asked.get("x-request-id", "")
        # Unique is enough: a secret one would cost a system call.
        request_id = given if _REQUEST_ID.fullmatch(given) else f"{random.getrandbits(64):016x}"
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(raw=message.setdefault("headers", []))
                headers.setdefault("x-request-id", request_id)
                # The name that Anthropic's clients read.
                headers.setdefault("request-id", request_id)
            await send(message)

        with span(f"{self._service} request", parent=asked.get("traceparent")) as current:
            trace_id = f"{current.get_span_context().trace_id:032x}"
            with bind(request_id=request_id, trace_id=trace_id):
                try:
                    await self._app(scope, receive, send_with_id)
                except ClientDisconnect:
                    pass
                except asyncio.CancelledError:
                    if status is not None:
                        raise
                    await _STOPPING(scope, receive, send_with_id)
                except Exception as error:
                    log.exception("request failed")
                    if status is not None:
                        raise
                    await self._unexpected(error)(scope, receive, send_with_id)
                finally:
                    current.update_name(f"{scope['method']} {_route(scope)}")
                    # No status: the client left before the answer started.
                    self._report(scope, status or 499, time.perf_counter() - started)

    def _report(self, scope: Scope, status: int, seconds: float) -> None:
        method, path = scope["method"], scope["path"]
        REQUEST_SECONDS.labels(self._service, method, _route(scope), str(status)).observe(seconds)
        log.info("request answered", method=method, path=path, status=status, seconds=round(seconds, 6))


def _route(scope: Scope) -> str:
    """The path template of the route. FastAPI names its routes in the scope; Starlette's name their endpoint alone."""
    if "route" in scope:
        return str(scope["route"].path)
    found = (one for one in scope["app"].routes if getattr(one, "endpoint", None) is scope.get("endpoint", ""))
    return getattr(next(found, None), "path", "unmatched")
