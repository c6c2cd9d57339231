"""Bounds on clients: connections, headers, the size of a body, the bytes of all bodies together, and deadlines.

Overloaded   the process has no room for another byte; the client should try again later
ShareUsed    the client's own requests have taken its part of that room

uvicorn bounds neither headers nor the time of a slow client. `RequestLimits` bounds headers and bodies,
`DeadlineProtocol` connections and the time of headers, and TCP_USER_TIMEOUT (Linux) the time of an unread answer.
Nothing here bounds clients per address or TLS handshakes: an ingress should.
"""

from __future__ import annotations

import asyncio
import math
import re
import socket
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from time import monotonic
from typing import Any

from prometheus_client import Counter, Gauge
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from leyden.libs.service.errors import Problem, problem_response

BODY_BYTES = Gauge("leyden_body_bytes", "Bytes of request bodies in this process's memory.")
REFUSALS = Counter("leyden_http_refusals_total", "Clients refused or cut off before or beside an answer.", ["cause"])

RESERVED_FILES = 256
"""Descriptors for everything that is no connection."""
LINGER_SECONDS = 2.0
"""Time for a client to read a refusal: closing at once would reset a connection with unread bytes."""
REST_SECONDS = 30.0
"""Time for the rest of an answered body: many clients read nothing before they have sent everything."""
STOP_SECONDS = 0.5
"""Time for the first request of a connection that a stopping process has just accepted."""
READ_BYTES = 2**18
"""The most that one read of a socket brings; part of it may precede the headers."""
PROBE_SECONDS = (0.001, 2.0)
"""The first and the longest wait between two questions whether a client that sends no more still reads."""
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
"""Every client of HTTP/1.1 skips this answer (RFC 9110 15.2); the machine of one that is gone resets the connection."""
MAX_AHEAD_BYTES = 2**17
"""Bytes that a client may send behind a request in progress; beyond them its hang-up shows only after the answer."""
_BARE_LF = re.compile(rb"(?<!\r)\n")
_UPGRADE = re.compile(rb"\nupgrade(?=[ \t]*:)", re.IGNORECASE)
"""The header is renamed: httptools drops the body behind it. Java's client asks for HTTP/2 with its first request;
HTTP/1.1 is the answer of a server without it (RFC 9110 7.8)."""
_HOST = re.compile(rb"[\w.~!$&'()*+,;=%:\[\]-]*", re.ASCII)


class Limits(BaseModel):
    """The bounds of one port on its clients."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    header_seconds: float = Field(default=20.0, gt=0)
    """Time of a client for the headers of a request; then it gets 408. A silent client is disconnected."""
    body_grace_seconds: float = Field(default=60.0, gt=0)
    """Time of a client for the body of a request, however small, and for a pause in a long one; then it gets 408."""
    body_bytes_per_second: int = Field(default=1000, ge=1)
    """Slowest accepted client: so many bytes of a body give back a used second of `body_grace_seconds`."""
    unread_seconds: float = Field(default=300.0, ge=0.001)
    """Time of a client to read on; then the kernel closes the connection of an unread answer (Linux)."""
    idle_seconds: float = Field(default=75.0, ge=1)
    """Life of an idle connection: longer than in usual clients, so that they close first."""
    max_connections: int = Field(default=8192, ge=1)
    """Connections at once, within the limit of open files; a further one gets 503 with Retry-After."""
    max_header_bytes: int = Field(default=32768, ge=1024)
    """Length of an address, and of all headers of a request together; longer ones get 414 and 431."""


class Overloaded(Exception):
    """The bodies in memory have reached the budget; the client should try again later."""


class ShareUsed(Exception):
    """The bodies of one client have reached its part of the budget; it should try again later."""


class Budget:
    """The bytes that the bodies of all requests together may take: a limit per body bounds nothing for thousands.

    Args: client_bytes: those that the requests of one client may take together
    """

    def __init__(self, free_bytes: int, *, client_bytes: float = math.inf) -> None:
        self.free_bytes = free_bytes
        self._client_bytes = client_bytes
        self._used: dict[Hashable, int] = {}

    @contextmanager
    def share(self, client: Hashable = None) -> Iterator[Share]:
        """The part of one request; the end of the block returns it to the budget.

        Args: client: whose request it is; None: nobody's, and only the whole budget bounds it
        """
        share = Share(self, client)
        try:
            yield share
        finally:
            share.acquire(-share.bytes)

    def take(self, client: Hashable, size_bytes: int) -> None:
        """Raises: ShareUsed: the client has its part; Overloaded: the budget has no room for so much."""
        used = self._used.get(client, 0) + size_bytes
        if client is not None and used > self._client_bytes:
            raise ShareUsed
        if size_bytes > self.free_bytes:
            raise Overloaded
        self.free_bytes -= size_bytes
        self._used[client] = used
        if not used:
            del self._used[client]
        BODY_BYTES.inc(size_bytes)


@dataclass
class Share:
    """The bytes of one request."""

    budget: Budget
    client: Hashable = None
    bytes: int = 0

    def acquire(self, size_bytes: int) -> None:
        """Raises: ShareUsed, Overloaded: there is no room for so much, its client's or at all."""
        self.budget.take(self.client, size_bytes)
        self.bytes += size_bytes


class RequestLimits:
    """Refuses long headers (414, 431); raises `Problem` 413 or 408 in a route that reads a long or a slow body.

    A body counts as long by its declared length or by its chunks. A route that answers without reading the body (401,
    404) gives its own answer. The deadlines are those of `app.state.limits`.

    Args: limits: largest bodies by path prefix; the first match counts.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, limits: Mapping[str, int]) -> None:
        self._app = app
        self._max_bytes = {**limits, "": max_bytes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limits: Limits = scope["app"].state.limits
        limit = limits.max_header_bytes
        refusal: Response | None = None
        if len(scope["raw_path"]) + len(scope["query_string"]) > limit:
            refusal = _refusal("head_too_long", 414, f"the address exceeds {limit} bytes")
        elif sum(len(name) + len(value) + 4 for name, value in scope["headers"]) > limit:
            refusal = _refusal("head_too_long", 431, f"the headers exceed {limit} bytes")
        await (refusal or self._app)(scope, self._bounded(scope, receive, limits), send)

    def _bounded(self, scope: Scope, receive: Receive, limits: Limits) -> Receive:
        most = next(most for prefix, most in self._max_bytes.items() if scope["path"].startswith(prefix))
        declared = Headers(scope=scope).get("content-length", "0")
        received = int(declared) if declared.isdecimal() and int(declared) > most else 0
        seconds_left, is_complete = limits.body_grace_seconds, False

        async def receive_bounded() -> Message:
            nonlocal received, seconds_left, is_complete
            started = monotonic()
            message: Message = {}
            if received <= most:
                try:
                    async with asyncio.timeout(None if is_complete else seconds_left):
                        message = await receive()
                except TimeoutError:
                    REFUSALS.labels("slow_body").inc()
                    detail, close = "the body came too slowly", {"connection": "close"}
                    raise Problem(408, detail, cause="slow_body", headers=close) from None
            size = len(message.get("body", b""))
            received += size
            if received > most:
                raise Problem(413, f"the body exceeds {most} bytes", cause="too_large")
            # Early bytes earn no pause: a body that lacks its last byte would keep its memory for hours.
            seconds_left += size / limits.body_bytes_per_second - monotonic() + started
            seconds_left = min(seconds_left, limits.body_grace_seconds)
            is_complete = not message.get("more_body", False)
            return message

        return receive_bounded


class MalformedHead(Exception):
    """A proxy in front might read the bytes of this request as other requests than we do; the message says why."""


class DeadlineProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a bound on connections, and on the size, the time and the meaning of headers.

    uvicorn reports a hang-up to the last request of a connection alone; this reports it to the one in progress, too.
    uvicorn takes the end of a client's sending for a hang-up, but it may only have no more to send. Before an answer
    begins, interim answers find out which of both it is.
    """

    def __init__(self, limits: Limits, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._limits = limits
        self._current: RequestResponseCycle | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._is_in_head = self._is_in_body = self._is_refused = self._is_stopping = False
        self._line = b""
        self._malformed: MalformedHead | None = None
        self._head_bytes = self._ahead_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._close_after(self._limits.header_seconds)
        if len(self.connections) > self._limits.max_connections:
            self._refuse("connections", 503, "too many connections: try again", {"retry-after": "1"})

    def connection_lost(self, exc: Exception | None) -> None:
        self._close_after(None)
        self._disconnect()
        super().connection_lost(exc)

    def eof_received(self) -> bool | None:  # type: ignore[override]  # uvicorn always closes
        """Returns whether the connection stays open, for the answer to a complete request.

        HTTP/1.0 has no interim answers, and within an answer there is no place for one: there it is a hang-up.
        """
        current = self._current
        if current is None or current.response_started or self._is_refused or self._is_in_head or self._is_in_body:
            return None
        if self.cycle.scope["http_version"] != "1.1":
            return None
        self.cycle.keep_alive = False
        self._probe(*PROBE_SECONDS)
        return True

    def _probe(self, seconds: float, longest: float) -> None:
        """Ends the connection of a client that is gone; asks again after this time, then after twice of it."""
        if self._current is None or self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        if not self._current.response_started and (seconds == longest or self._deadline is None):
            self.transport.write(INTERIM)
        self._close_after(None)
        self._deadline = self.loop.call_later(seconds, self._probe, min(2 * seconds, longest), longest)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        try:
            lines = data if self._current or self._is_in_body else self._by_lines(data)
        except MalformedHead as error:
            self._refuse("malformed", 400, str(error))
            return
        super().data_received(lines)
        self._head_bytes = self._head_bytes + len(data) if self._is_in_head else 0
        if self._head_bytes > self._limits.max_header_bytes + READ_BYTES:
            self._refuse("head_too_long", 431, f"the headers exceed {self._limits.max_header_bytes} bytes")
        elif self._current:
            self._close_after(None)
        elif self._deadline is None:
            self._close_after(self._limits.header_seconds)
        self._ahead_bytes = self._ahead_bytes + len(data) if self.pipeline else 0
        if 0 < self._ahead_bytes <= MAX_AHEAD_BYTES:
            # uvicorn stops reading here, and would not see that the client hangs up.
            self.flow.resume_reading()

    def _by_lines(self, data: bytes) -> bytes:
        """Retains the last line of an unfinished head, with the line break before it: cut in two, a name hides.

        Raises: MalformedHead: the parser would wait for the rest of a head that its sender has ended with bare LF
        """
        head, end, body = (self._line + data).partition(b"\n\r\n")
        if _BARE_LF.search(head + end):
            raise MalformedHead("the lines of a head end with CRLF; one of this head ends with LF alone")
        head = _UPGRADE.sub(b"\nIgnored", head)
        head, self._line = (head, b"") if end else _before_last_line(head)
        return head + end + body

    def on_message_begin(self) -> None:
        self._is_in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head, self._is_in_body = False, True
        self._check_head()
        super().on_headers_complete()
        self._current = self._current or self.cycle
        self.cycle.keep_alive = self.cycle.keep_alive and not self._is_stopping

    def on_message_complete(self) -> None:
        self._is_in_body = False
        super().on_message_complete()

    def _check_head(self) -> None:
        """Raises: MalformedHead; the parser then reads nothing more and calls `send_400_response`."""
        try:
            check_head(self.parser.get_http_version(), self.headers, is_upgrade=self.parser.should_upgrade())
        except MalformedHead as error:
            self._malformed = error
            raise

    def on_response_complete(self) -> None:
        self._current = self.pipeline[-1][0] if self.pipeline else None
        if self._current is None and self.cycle.more_body:
            self._close_after(REST_SECONDS)
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse("malformed", 400, str(self._malformed or "this is no valid HTTP/1.1 request"))

    def shutdown(self) -> None:
        """Finishes the requests in progress, and the first one of a new connection; accepts no other."""
        self._is_stopping = True
        if self._current is None and (self.cycle is None or self._is_in_head):
            self._close_after(min(STOP_SECONDS, self._limits.header_seconds))
        else:
            super().shutdown()

    def _close_after(self, seconds: float | None) -> None:
        """Moves the deadline of the connection; None removes it."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self._close)

    def _close(self) -> None:
        if self._is_in_head and not self._is_refused:
            self._refuse("slow_head", 408, "the headers came too slowly")
        else:
            self.transport.close()

    def _disconnect(self) -> None:
        if self._current is not None:
            self._current.disconnected = True
            self._current.message_event.set()

    def _refuse(self, cause: str, status: int, detail: str, headers: Mapping[str, str] | None = None) -> None:
        """Answers instead of the application, to which the client looks disconnected; never inside another answer."""
        response = _refusal(cause, status, detail, headers)
        self._is_refused = True
        self._disconnect()
        if self._current is not None and self._current.response_started:
            self.transport.abort()
            return
        lines = [b"HTTP/1.1 %d %b" % (status, HTTPStatus(status).phrase.encode())]
        lines += [b"%b: %b" % header for header in response.raw_headers]
        self.transport.write(b"\r\n".join([*lines, b"", bytes(response.body)]))
        self.transport.write_eof()
        self._close_after(LINGER_SECONDS)


def _refusal(cause: str, status: int, detail: str, headers: Mapping[str, str] | None = None) -> Response:
    REFUSALS.labels(cause).inc()
    return problem_response(status, detail, cause=cause, headers={"connection": "close", **(headers or {})})


def check_head(version: str, headers: Sequence[tuple[bytes, bytes]], *, is_upgrade: bool) -> None:
    """Refuses a head that two readers could end, or address, in two ways (RFC 9112 3.2, 6.1, 6.3).

    Args:   headers: names in lower case; is_upgrade: the parser takes the bytes behind the head for another protocol
    Raises: MalformedHead
    """
    hosts = [value for name, value in headers if name == b"host"]
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        raise MalformedHead(f"a request has one Host header; this one has {len(hosts)}")
    if hosts and not _HOST.fullmatch(hosts[0]):
        raise MalformedHead("the Host header is no name of a host")
    if codings and (version != "1.1" or [coding.lower() for coding in codings] != [b"chunked"]):
        raise MalformedHead("the only Transfer-Encoding is `chunked`, in HTTP/1.1; compress with Content-Encoding")
    if is_upgrade:
        raise MalformedHead("this server speaks HTTP/1.1 alone: send no CONNECT, and Upgrade only with a first request")


def _before_last_line(head: bytes) -> tuple[bytes, bytes]:
    """Cuts the beginning of a head before its last line break, of which the LF may be to come."""
    end = head.rfind(b"\r\n")
    end = len(head) - head.endswith(b"\r") if end < 0 else end
    return head[:end], head[end:]
