"""Bounds on clients: the size of a body, the bytes of all bodies together, connections, headers, and deadlines.

Overloaded   the process has no room for another byte; the client should come again

uvicorn parses, frames and keeps connections alive. It has no deadline for headers, bodies or unread answers and no
bound on headers; `ClientLimits` (ASGI, around every application) and `DeadlineProtocol` (on every connection) add them.
An ingress should bound clients per address and TLS handshakes: nothing here does.
"""

from __future__ import annotations

import asyncio
import re
import resource
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

from prometheus_client import Counter, Gauge
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from leyden.libs.service.errors import Problem, problem_response

BODY_BYTES = Gauge("leyden_body_bytes", "Bytes of request bodies in this process's memory.")
REFUSALS = Counter("leyden_http_refusals_total", "Connections refused or cut before or beside an answer.", ["cause"])

RESERVED_FILES = 256
"""Descriptors for everything that is no connection."""
LINGER_SECONDS = 2.0
"""Time for a refused client to read the refusal: closing earlier resets a connection with unread bytes."""
REST_SECONDS = 30.0
"""Time for the rest of a body after an early answer: many clients read nothing before they have sent everything."""
STOP_SECONDS = 0.5
"""Time for the first request of a connection that a stopping process has just accepted."""
_UPGRADE = re.compile(rb"\nupgrade(?=[ \t]*:)", re.IGNORECASE)
MAX_AHEAD_BYTES = 128 * 1024
"""Bytes that a client may send behind a request in progress; beyond them, its hang-up shows only after the answer."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of one process on its clients; the fields of `HttpSettings` with the same names explain them."""

    header_seconds: float = 20.0
    body_grace_seconds: float = 60.0
    body_bytes_per_second: int = 1000
    unread_seconds: float = 300.0
    idle_seconds: float = 75.0
    max_connections: int = 8192
    max_header_bytes: int = 32768

    def within(self, open_files: int) -> Limits:
        """The same, with no more connections than a process with so many descriptors can have."""
        if open_files == resource.RLIM_INFINITY:
            return self
        return replace(self, max_connections=max(1, min(self.max_connections, open_files - RESERVED_FILES)))


class Overloaded(Exception):
    """The bodies in memory have reached the budget; the client should come again."""


class Budget:
    """The bytes that the bodies of all requests together may take: a limit per body bounds nothing for thousands."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._used = 0

    @contextmanager
    def share(self) -> Iterator[Share]:
        """The part of one request; the end of the block returns it to the budget."""
        share = Share(self)
        try:
            yield share
        finally:
            self._change(-share.bytes)

    def _change(self, size_bytes: int) -> None:
        self._used += size_bytes
        BODY_BYTES.set(self._used)

    def acquire(self, size_bytes: int) -> None:
        """Raises: Overloaded: the budget has no room for so much."""
        if self._used + size_bytes > self._limit:
            raise Overloaded
        self._change(size_bytes)


class Share:
    """The bytes of one request."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.bytes = 0

    def acquire(self, size_bytes: int) -> None:
        """Raises: Overloaded: the budget has no room for so much."""
        self._budget.acquire(size_bytes)
        self.bytes += size_bytes

    take = acquire


class BodyLimit:
    """Raises `Problem` 413 as soon as a route reads a body beyond the limit, declared or chunked.

    A route that answers without reading the body (401, 404) gives its own answer.

    Args: limits: path prefixes with a limit of their own; the first match counts.
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
        declared = header(scope, b"content-length") or "0"
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


class ClientLimits:
    """Refuses one connection too many (503) and long headers (414, 431), and raises `Problem` 408 for a slow body.

    The deadline of a body counts only the time in which the application waits for it.
    """

    def __init__(self, app: ASGIApp, limits: Limits, connections: Collection[object]) -> None:
        self._app = app
        self._limits = limits
        self._connections = connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        body = _TimedBody(receive, send, self._limits)
        await self._app(scope, body.receive, body.send)

    def _refusal(self, scope: Scope) -> Response | None:
        limit = self._limits.max_header_bytes
        if len(self._connections) > self._limits.max_connections:
            return _refusal("connections", 503, "too many connections: try again", {"retry-after": "1"})
        if len(scope["raw_path"]) + len(scope["query_string"]) > limit:
            return _refusal("head_too_long", 414, f"the address exceeds {limit} bytes")
        if sum(len(name) + len(value) + 4 for name, value in scope["headers"]) > limit:
            return _refusal("head_too_long", 431, f"the headers exceed {limit} bytes")
        return None


def _refusal(cause: str, status: int, detail: str, headers: Mapping[str, str] | None = None) -> Response:
    REFUSALS.labels(cause).inc()
    return problem_response(status, detail, cause=cause, headers={"connection": "close", **(headers or {})})


class _TimedBody:
    """The two ASGI channels of a request whose body has a deadline."""

    def __init__(self, receive: Receive, send: Send, limits: Limits) -> None:
        self._receive = receive
        self._send = send
        self._seconds_left = limits.body_grace_seconds
        self._bytes_per_second = limits.body_bytes_per_second
        self._is_complete = False
        self._is_late = False

    async def receive(self) -> Message:
        """The next message.

        Raises: Problem: 408
        """
        if self._is_complete:
            return await self._receive()
        started = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self._seconds_left):
                message = await self._receive()
        except TimeoutError:
            self._is_late = True
            REFUSALS.labels("slow_body").inc()
            raise Problem(408, "the body came too slowly", cause="slow_body") from None
        self._seconds_left -= asyncio.get_running_loop().time() - started
        self._seconds_left += len(message.get("body", b"")) / self._bytes_per_second
        self._is_complete = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """Sends a message; the answer to a late body closes its connection."""
        if self._is_late and message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), (b"connection", b"close")]}
        await self._send(message)


class DeadlineProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with deadlines for headers, for the rest of an answered body, and for unread answers.

    A client that is slow with its headers gets 408, endless headers 431, a malformed request 400; a silent client is
    disconnected. uvicorn tells the last request of a connection alone that the client hung up: this tells all of them,
    so that the request in progress ends, too, when its client had sent others behind it.
    """

    def __init__(self, limits: Limits, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._limits = limits
        self._unanswered: list[RequestResponseCycle] = []
        self._deadline: asyncio.TimerHandle | None = None
        self._unread_deadline: asyncio.TimerHandle | None = None
        self._is_in_head = False
        self._head_bytes = 0
        self._ahead_bytes = 0
        self._is_refused = False
        self._is_stopping = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._end_after(self._limits.header_seconds)
        if len(self.connections) > self._limits.max_connections + RESERVED_FILES // 2:
            # Too few descriptors are left for the 503 of `ClientLimits`.
            REFUSALS.labels("connections").inc()
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        self.resume_writing()
        self._disconnect()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        head = self.scope if self._is_in_head else None
        super().data_received(data if self._unanswered else _without_upgrade(data))
        if self._is_in_head and self.scope is head:
            self._head_bytes += len(data)
            if self._head_bytes > self._limits.max_header_bytes:
                self._refuse("head_too_long", 431, f"the headers exceed {self._limits.max_header_bytes} bytes")
                return
        if self._unanswered:
            self._cancel_deadline()
        elif self._deadline is None:
            self._end_after(self._limits.header_seconds)
        self._ahead_bytes = self._ahead_bytes + len(data) if self.pipeline else 0
        if 0 < self._ahead_bytes <= MAX_AHEAD_BYTES:
            # uvicorn stops reading here, and would not see that the client hangs up.
            self.flow.resume_reading()

    def on_message_begin(self) -> None:
        self._is_in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()
        self._unanswered.append(self.cycle)
        if self._is_stopping:
            self.cycle.keep_alive = False

    def on_response_complete(self) -> None:
        self._unanswered = [cycle for cycle in self._unanswered if not cycle.response_complete]
        if not self._unanswered and self.cycle.more_body:
            self._end_after(REST_SECONDS)
        super().on_response_complete()

    def pause_writing(self) -> None:
        self._unread_deadline = self.loop.call_later(self._limits.unread_seconds, self._cut_unread)
        super().pause_writing()

    def resume_writing(self) -> None:
        if self._unread_deadline is not None:
            self._unread_deadline.cancel()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        self._refuse("malformed", 400, "this is no valid HTTP/1.1 request")

    def shutdown(self) -> None:
        """Finishes the requests in progress, and the first one of a new connection; takes no other."""
        self._is_stopping = True
        if not self._unanswered and (self.cycle is None or self._is_in_head):
            self._end_after(min(STOP_SECONDS, self._limits.header_seconds))
        else:
            super().shutdown()

    def _end_after(self, seconds: float) -> None:
        self._cancel_deadline()
        self._deadline = self.loop.call_later(seconds, self._end)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end(self) -> None:
        if self._is_in_head and not self._is_refused:
            self._refuse("slow_head", 408, "the headers came too slowly")
        else:
            self.transport.close()

    def _cut_unread(self) -> None:
        REFUSALS.labels("unread").inc()
        self.transport.abort()

    def _disconnect(self) -> None:
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()

    def _refuse(self, cause: str, status: int, detail: str) -> None:
        """Answers instead of the application, which sees a disconnected client; nothing interrupts a started answer."""
        self._is_refused = True
        self._disconnect()
        if any(cycle.response_started for cycle in self._unanswered):
            REFUSALS.labels(cause).inc()
            self.transport.abort()
            return
        response = _refusal(cause, status, detail)
        lines = [b"HTTP/1.1 %d %b" % (status, HTTPStatus(status).phrase.encode())]
        lines += [b"%b: %b" % header for header in response.raw_headers]
        self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + bytes(response.body))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._end_after(LINGER_SECONDS)


def _without_upgrade(data: bytes) -> bytes:
    """The data without a header that asks for another protocol, in as many bytes.

    Java's client asks for HTTP/2 in its first request, and httptools then drops the body. No answer in HTTP/2 means
    HTTP/1.1 (RFC 9110, 7.8).
    """
    head, end, body = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"\nIgnored", head) + end + body


def header(scope: Scope, name: bytes) -> str | None:
    """The first header of this lower-case name."""
    for given, value in scope["headers"]:
        if given == name:
            return str(value, "latin-1")
    return None


def _too_large(limit: int) -> Problem:
    return Problem(413, f"the body exceeds {limit} bytes", cause="too_large")
