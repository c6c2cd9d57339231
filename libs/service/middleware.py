"""Pure ASGI middleware: nothing here buffers, so that a stream leaves as it comes.

`RequestContext` gives each request an id, a span, a log line and a metric; `BodyLimit` bounds what a client may send.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Callable, Mapping
from functools import lru_cache

from prometheus_client import Histogram
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from leyden.libs.service.problems import Problem, problem_response
from leyden.libs.telemetry import SECONDS_BUCKETS, bind, logger, span

QUIET_PATHS = frozenset({"/", "/healthz", "/readyz", "/metrics"})
"""Neither logged nor measured: what watchers ask, all day long."""
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

    Also the place where an exception that no handler knows ends: it is logged once and answered by `unexpected`, or,
    when the answer has begun, raised on so that the server cuts the connection. A request that is cancelled because the
    process stops is answered with 503. Paths are logged without their query.
    """

    def __init__(self, app: ASGIApp, *, service: str, unexpected: Callable[[Exception], Response]) -> None:
        self._app = app
        self._service = service
        self._unexpected = unexpected

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in QUIET_PATHS:
            await self._app(scope, receive, send)
            return
        answer = _Answer(send, _request_id(_header(scope, b"x-request-id")))
        with span(f"{self._service} request", parent=_header(scope, b"traceparent")) as current:
            trace_id = f"{current.get_span_context().trace_id:032x}"
            with bind(request_id=answer.request_id, trace_id=trace_id):
                try:
                    await self._answered(scope, receive, answer)
                finally:
                    current.update_name(f"{scope['method']} {_route(scope)}")
                    self._tell(scope, answer)

    async def _answered(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        try:
            await self._app(scope, receive, answer.send)
        except ClientDisconnect:
            # Nobody is left to be answered.
            return
        except asyncio.CancelledError:
            if answer.status is not None:
                raise
            await _STOPPING(scope, receive, answer.send)
        except Exception as error:
            log.exception("request failed")
            if answer.status is not None:
                raise
            await self._unexpected(error)(scope, receive, answer.send)

    def _tell(self, scope: Scope, answer: _Answer) -> None:
        seconds = time.perf_counter() - answer.began
        # No status: the client left, or the process is stopping, before an answer began.
        status = str(answer.status or 499)
        _seconds_of(self._service, scope["method"], _route(scope), status).observe(seconds)
        log.info(
            "request answered",
            method=scope["method"],
            path=scope["path"],
            status=int(status),
            seconds=round(seconds, 6),
        )


class _Answer:
    """Watches an answer pass by: its status, and the request id added to its headers."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self.request_id = request_id
        self.began = time.perf_counter()
        self.status: int | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(raw=message.setdefault("headers", [])).setdefault("x-request-id", self.request_id)
        await self._send(message)


class BodyLimit:
    """Raises `Problem` 413 where a route reads a body beyond the limit, declared or chunked.

    Args: limits: path prefixes with a limit of their own, the first match counts.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, limits: Mapping[str, int]) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._limits = dict(limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._limit(scope["path"])
        declared = _header(scope, b"content-length") or "0"
        received = 0

        async def receive_bounded() -> Message:
            nonlocal received
            if declared.isdecimal() and int(declared) > limit:
                raise _too_large(limit)
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit:
                raise _too_large(limit)
            return message

        await self._app(scope, receive_bounded, send)

    def _limit(self, path: str) -> int:
        return next((limit for prefix, limit in self._limits.items() if path.startswith(prefix)), self._max_bytes)


def _too_large(limit: int) -> Problem:
    return Problem(413, f"the body exceeds {limit} bytes", cause="too_large")


def _header(scope: Scope, name: bytes) -> str | None:
    """The first header of this lower-case name."""
    for given, value in scope["headers"]:
        if given == name:
            return str(value, "latin-1")
    return None


def _request_id(given: str | None) -> str:
    # It only has to be another one: what the system has of chance costs a call of it.
    return given if given and _REQUEST_ID.fullmatch(given) else f"{random.getrandbits(64):016x}"


# Finding a metric's child by its labels takes ten times as long.
_seconds_of = lru_cache(maxsize=1024)(REQUEST_SECONDS.labels)


def _route(scope: Scope) -> str:
    return getattr(scope.get("route"), "path", None) or "unmatched"
