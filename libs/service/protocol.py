"""HTTP/1.1 on one connection: uvicorn's protocol, which trusts clients to be quick and brief, within limits.

A client that is slow with its headers or body gets 408, one whose headers are too long 431 or 414, one that sends what
is no HTTP 400, one connection too many 503 with Retry-After. Who leaves an answer unread is cut. Time is looked at once
a second for all connections together: a request costs no timer.

Requests may be sent ahead. Little of them is read while an answer is in hand, and their time begins with their turn.
That such a client hangs up is noticed within a second, unless it has sent more than the socket's buffers take: then the
request in hand goes on to its end.
"""

from __future__ import annotations

import asyncio
import re
import select
import weakref
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Scope
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from leyden.libs.service.errors import problem_response
from leyden.libs.service.limits import REFUSALS, RESERVED_FILES, Limits
from leyden.libs.service.turns import Turns

LINGER_SECONDS = 2.0
"""How long a refused client may go on sending, so that it reads why before the connection is gone."""
REST_SECONDS = 30.0
"""How long a client may go on sending a body that was answered early: many read nothing before all is sent."""
CLOSING_SECONDS = 0.5
"""How long a process that stops waits for the request of a connection that it has just accepted."""
Write = Callable[[bytes], bool]
"""Writes a piece of an answer's body at once and tells whether the client keeps up. One that does not is waited for by
sending, be it nothing, before more is written."""
_WRITE = "leyden.write"
_UPGRADE = re.compile(rb"\n(?i:upgrade)(?=[ \t]*:)")
_LEFT = getattr(select, "POLLRDHUP", select.POLLHUP)
"""That the other side sends no more; only Linux tells it while something is left to read."""


def writer_of(scope: Scope) -> Write | None:
    """How an answer of unknown length, once begun, is written past all layers; None where the server cannot."""
    write: Write | None = scope.get("extensions", {}).get(_WRITE, {}).get("write")
    return write


class _Phase(Enum):
    NEW = auto()
    """Nothing has come yet."""
    IDLE = auto()
    """Between two requests."""
    HEAD = auto()
    BODY = auto()
    ANSWER = auto()
    """The request is whole."""
    REST = auto()
    """The answer was given before the body had come: what is left is read and dropped."""
    REFUSED = auto()


class Protocol(HttpToolsProtocol):
    """One connection. `look` is called about once a second.

    Args: turns: in which its requests begin, those of all connections together
    """

    def __init__(self, limits: Limits, turns: Turns, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._turns = turns
        self._limits = limits
        self._phase = _Phase.NEW
        self._since = self.loop.time()
        self._received = 0
        self._stuck_since: float | None = None
        self._is_closing = False
        self._begun: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        excess = len(self.connections) - self._limits.max_connections
        if excess > 0:
            REFUSALS.labels("connections").inc()
            # Told, as long as there are descriptors left to tell it with.
            if excess > RESERVED_FILES // 2:
                transport.abort()
            self._answer_with(503, "too many connections: try again", retry_after_seconds=1)

    def connection_lost(self, exc: Exception | None) -> None:
        # uvicorn tells the last request alone, be it one that was sent ahead.
        self._abandon()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._phase is _Phase.REFUSED:
            return
        if self._phase in {_Phase.NEW, _Phase.IDLE}:
            self._enter(_Phase.HEAD)
        super().data_received(_without_upgrade(data) if self._phase is _Phase.HEAD else data)
        self._received += len(data)
        if self._phase is _Phase.HEAD and self._received > self._limits.max_header_bytes:
            self._refuse("head_too_long", 431, f"the headers exceed {self._limits.max_header_bytes} bytes")

    def on_message_begin(self) -> None:
        # Of several requests in one piece of data, each counts for itself.
        self._enter(_Phase.HEAD)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        limit = self._limits.max_header_bytes
        if len(self.url) > limit:
            REFUSALS.labels("head_too_long").inc()
            self._answer_with(414, f"the address exceeds {limit} bytes")
        elif sum(len(name) + len(value) + 4 for name, value in self.headers) > limit:
            REFUSALS.labels("head_too_long").inc()
            self._answer_with(431, f"the headers exceed {limit} bytes")
        self._enter(_Phase.BODY)
        super().on_headers_complete()
        self.scope["extensions"] = {_WRITE: {"write": partial(_write, weakref.ref(self.cycle))}}
        if self._is_closing and self.cycle is not None:
            self.cycle.keep_alive = False

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._begun = cycle
        self._turns.take(partial(super()._start_asgi_task, cycle, app))

    def on_body(self, body: bytes) -> None:
        if not self.cycle.body:
            # A body that comes in one piece is kept as it is; uvicorn would copy it here and when it is read.
            self.cycle.body = b""  # type: ignore[assignment]  # as good as its bytearray
        super().on_body(body)

    def on_message_complete(self) -> None:
        rest = self._phase is _Phase.REST
        self._enter(_Phase.IDLE if rest else _Phase.ANSWER)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        # With requests sent ahead, the phase is that of the last one.
        if self.cycle.response_complete and self._phase is _Phase.BODY:
            self._enter(_Phase.REST)
        elif self.cycle.response_complete and self._phase is _Phase.ANSWER:
            self._enter(_Phase.IDLE)
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse("malformed", 400, "this is no valid HTTP/1.1 request")

    def pause_writing(self) -> None:
        self._stuck_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stuck_since = None
        super().resume_writing()

    def shutdown(self) -> None:
        """No further request; one that is on its way is answered."""
        self._is_closing = True
        if self._phase in {_Phase.IDLE, _Phase.REFUSED, _Phase.REST}:
            self.transport.close()
        elif self.cycle is not None:
            self.cycle.keep_alive = False

    def look(self, now: float, seconds: float) -> None:
        """Ends what takes too long.

        Args: now: the loop's time; seconds: since the last look
        """
        if self._stuck_since is not None and now - self._stuck_since > self._limits.unread_seconds:
            REFUSALS.labels("unread").inc()
            self.transport.abort()
            return
        if self._is_answering() and self.flow.read_paused and self._has_left():
            # `connection_lost` tells the request in hand.
            self.transport.abort()
            return
        if self._is_sent_ahead():
            self._since = now
        elif self._phase is _Phase.BODY and self.flow.read_paused:
            # We do not read: the time is ours.
            self._since += seconds
        late = now - self._since
        match self._phase:
            case _Phase.NEW | _Phase.HEAD if late > self._head_seconds():
                self._end_of_patience()
            case _Phase.BODY if late > self._body_seconds():
                self._refuse("slow_body", 408, "the body came too slowly")
            case _Phase.REFUSED if late > LINGER_SECONDS:
                self.transport.close()
            case _Phase.REST if late > REST_SECONDS:
                self.transport.close()
            case _Phase.IDLE if late > self._limits.idle_seconds:
                self.transport.close()

    def _head_seconds(self) -> float:
        return min(CLOSING_SECONDS, self._limits.header_seconds) if self._is_closing else self._limits.header_seconds

    def _body_seconds(self) -> float:
        return self._limits.body_grace_seconds + self._received / self._limits.body_bytes_per_second

    def _end_of_patience(self) -> None:
        if self._phase is _Phase.NEW:
            self.transport.close()
        else:
            self._refuse("slow_head", 408, "the headers came too slowly")

    def _abandon(self) -> bool:
        """Lets the request in hand know that its client is gone; True when a part of its answer has left."""
        cycle = self._begun
        if cycle is None or cycle.response_complete:
            return False
        cycle.disconnected = True
        cycle.message_event.set()
        return cycle.response_started

    def _is_answering(self) -> bool:
        """Whether a request is in hand whose client has not been given up."""
        return self._begun is not None and not (self._begun.response_complete or self._begun.disconnected)

    def _has_left(self) -> bool:
        """Whether the client has hung up, be it behind data that is not read."""
        if self.transport.is_closing():
            # Its descriptor may be another's by now.
            return False
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket"), _LEFT)
        return bool(poll.poll(0))

    def _is_sent_ahead(self) -> bool:
        """Whether what comes is a request behind the one in hand."""
        is_other = self._phase is _Phase.HEAD or (self._phase is _Phase.BODY and self.cycle is not self._begun)
        return is_other and self._is_answering()

    def _enter(self, phase: _Phase) -> None:
        self._phase, self._since, self._received = phase, self.loop.time(), 0

    def _answer_with(self, status: int, detail: str, *, retry_after_seconds: int | None = None) -> None:
        """Lets every request of this connection have this answer."""
        self.app = _refusing(status, detail, retry_after_seconds)

    def _refuse(self, cause: str, status: int, detail: str) -> None:
        """Answers beside the application, which learns that its client is gone, and closes."""
        REFUSALS.labels(cause).inc()
        self._enter(_Phase.REFUSED)
        if self._abandon():
            # Words of ours in the middle of an answer would be taken for a part of it.
            self.transport.abort()
            return
        body = bytes(problem_response(status, detail).body)
        lines = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
            "content-type: application/problem+json",
            f"content-length: {len(body)}",
            "connection: close",
        )
        self.transport.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()


def _without_upgrade(data: bytes) -> bytes:
    """The data with no header in it that asks for another protocol, as far as the first head goes and is in one piece.

    Clients that would rather speak HTTP/2 ask in their first request (Java's do), and the parser takes such a request
    to have no body. A server that has no other protocol is to answer in this one.
    """
    end = data.find(b"\r\n\r\n")
    end = len(data) if end < 0 else end
    # A body may be long: only where there is one to leave out is anything copied.
    if _UPGRADE.search(data, 0, end) is None:
        return data
    return _UPGRADE.sub(b"\nx-upgrade", data[:end]) + data[end:]


def _write(answering: weakref.ref[RequestResponseCycle], data: bytes) -> bool:
    # Held weakly, as it holds the scope in which this function is: nothing that a request leaves behind is a cycle.
    cycle = answering()
    if cycle is None or not cycle.chunked_encoding or cycle.response_complete:
        raise RuntimeError("only an answer in chunks, between its beginning and its end, can be written at once")
    if not cycle.disconnected:
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
    return not cycle.flow.write_paused


def _refusing(status: int, detail: str, retry_after_seconds: int | None) -> ASGIApp:
    headers = {"connection": "close"}
    if retry_after_seconds is not None:
        headers["retry-after"] = str(retry_after_seconds)
    return problem_response(status, detail, headers=headers)
