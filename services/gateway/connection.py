"""HTTP/1.1 to engines: each piece of an answer is handed on in the moment it comes.

A stream is thousands of small pieces. One costs a look at the parser and a call of a function: no task wakes up for it,
no timer is set anew, and nothing is kept of it. A whole answer takes the same way.
"""

from __future__ import annotations

import asyncio
import ssl
from base64 import b64encode
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import cast
from urllib.parse import unquote, urlsplit

import httptools

CONNECT_SECONDS = 5.0
KEPT_SECONDS = 30.0
"""How long an idle connection may be used again."""
HEAD_BYTES = 64 * 1024
"""The longest head of an answer, and the longest refusal that is read."""

Parts = Sequence[bytes | memoryview]
"""A body in pieces that are sent one after another: nothing copies them into one."""
Take = Callable[[bytes], None]
"""Gets a piece of an answer's body, and nothing once it is whole."""
Stop = Callable[[Callable[[], Awaitable[None]]], Awaitable[None]]
"""Stops an answer that nobody waits for any more. Gets what waits for the rest of it, which is taken meanwhile."""


class Refused(Exception):
    """An answer that is no 200: its status and what it says."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status
        self.text = text


@dataclass(frozen=True, slots=True)
class Address:
    """Where a URL leads: a server, and the lines of a request's head that the URL tells."""

    host: str
    port: int
    is_secure: bool
    head: str

    @property
    def server(self) -> tuple[str, int, bool]:
        """What requests that share connections have in common."""
        return self.host, self.port, self.is_secure


@lru_cache(maxsize=1024)
def address_of(url: str) -> Address:
    """The parts of an http(s) URL; a user and password in it become an authorization."""
    parts = urlsplit(url)
    is_secure = parts.scheme == "https"
    account, _, host = parts.netloc.rpartition("@")
    lines = [f"POST {parts.path or '/'} HTTP/1.1", f"host: {host}", "accept: */*"]
    if account:
        lines.append(f"authorization: Basic {b64encode(unquote(account).encode()).decode()}")
    return Address(parts.hostname or "", parts.port or (443 if is_secure else 80), is_secure, "\r\n".join(lines))


class Connections:
    """Connections to engines, as many as there are requests; idle ones are used again.

    Args: silence_seconds: an engine that sends nothing for this long while it owes an answer is lost
    """

    def __init__(self, *, silence_seconds: float) -> None:
        self._silence_seconds = silence_seconds
        self._idle: dict[tuple[str, int, bool], deque[Connection]] = {}

    async def post(
        self, url: str, body: Parts, headers: Mapping[str, str], take: Take, stop: Stop | None = None
    ) -> None:
        """Sends a request and returns when the answer is whole; each piece of its body is taken as it comes.

        Args: stop: awaited when the wait is cancelled, before the connection is closed
        Raises: Refused: the answer is no 200; OSError, TimeoutError: none came, or not all of it; what `take` raises
        """
        address = address_of(url)
        connection = self._kept(address) or await self._connected(address)
        lines = (address.head, *(f"{name}: {value}" for name, value in headers.items()))
        head = "\r\n".join((*lines, f"content-length: {sum(map(len, body))}", "", ""))
        is_whole = False
        try:
            await connection.ask((head.encode("latin-1"), *body), take)
            is_whole = True
        except Refused:
            is_whole = True
            raise
        except asyncio.CancelledError:
            if stop is not None:
                await stop(connection.rest)
            raise
        finally:
            if is_whole:
                self._keep(address, connection)
            else:
                connection.abort()

    def close(self) -> None:
        """Closes the idle ones."""
        for connections in self._idle.values():
            for connection in connections:
                connection.abort()
        self._idle.clear()

    def _kept(self, address: Address) -> Connection | None:
        idle = self._idle.get(address.server, ())
        # The latest first: the others then grow old together and are closed.
        while idle:
            connection = idle.pop()
            if connection.is_fresh:
                return connection
            connection.abort()
        return None

    def _keep(self, address: Address, connection: Connection) -> None:
        idle = self._idle.setdefault(address.server, deque())
        idle.append(connection)
        while idle and not idle[0].is_fresh:
            idle.popleft().abort()

    async def _connected(self, address: Address) -> Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_SECONDS):
            _, connection = await loop.create_connection(
                lambda: Connection(loop, self._silence_seconds),
                address.host,
                address.port,
                ssl=self._trust if address.is_secure else None,
            )
        return connection

    @cached_property
    def _trust(self) -> ssl.SSLContext:
        return ssl.create_default_context()


class Connection(asyncio.Protocol):
    """One connection; a request at a time."""

    # One block of memory: those of hundreds of streams do not stay in the caches.
    __slots__ = (
        "_answered", "_has_length", "_head_bytes", "_heard_at", "_is_reusable", "_is_whole", "_loop", "_parser",
        "_pieces", "_refusal", "_silence_seconds", "_status", "_take", "_timer", "_transport",
    )  # fmt: skip
    _transport: asyncio.Transport

    def __init__(self, loop: asyncio.AbstractEventLoop, silence_seconds: float) -> None:
        self._loop = loop
        self._silence_seconds = silence_seconds
        self._parser = httptools.HttpResponseParser(self)
        self._timer: asyncio.TimerHandle | None = None
        self._is_reusable = True
        self._begin(lambda _: None)
        # Nothing was asked.
        self._answered.set_result(None)

    def _begin(self, take: Take) -> None:
        self._take = take
        self._answered: asyncio.Future[None] = self._loop.create_future()
        self._pieces: list[bytes] = []
        self._refusal = b""
        self._status = 0
        self._head_bytes = 0
        self._has_length = self._is_whole = False
        self._heard_at = self._loop.time()

    @property
    def is_fresh(self) -> bool:
        """Whether it may be used again."""
        return self._is_reusable and self._loop.time() - self._heard_at < KEPT_SECONDS

    async def ask(self, request: Parts, take: Take) -> None:
        """As `Connections.post`; after any other error than `Refused`, or cancelled, it must be aborted.

        Cancelled, it takes what comes until then.
        """
        self._begin(take)
        if self._timer is None:
            self._timer = self._loop.call_later(self._silence_seconds, self._look)
        self._transport.writelines(request)
        await asyncio.shield(self._answered)
        if self._status != 200:
            raise Refused(self._status, self._refusal.decode(errors="replace"))

    async def rest(self) -> None:
        """Returns when nothing more will come of an answer, the wait for which was cancelled."""
        await asyncio.wait({self._answered})

    def abort(self) -> None:
        """Closes it at once."""
        self._is_reusable = False
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        # Where we aborted it ourselves, the answer has no end.
        is_end = exc is None and self._is_reusable and not self._has_length
        self._is_reusable = False
        if self._timer is not None:
            self._timer.cancel()
        try:
            if is_end and self._status and not self._answered.done():
                self._end()
        except Exception as error:  # noqa: BLE001  # as in `data_received`
            self._fail(error)
        self._fail(ConnectionError(str(exc or "the engine closed the connection")))

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        if self._answered.done():
            # Nothing was asked, or the answer has failed already.
            self.abort()
            return
        try:
            self._read(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(ConnectionError(f"what the engine sends is no HTTP: {error}"))
        # Whoever waits for the answer is told, whatever it is: above all what `take` makes of it.
        except Exception as error:  # noqa: BLE001
            self._fail(error)

    def on_message_begin(self) -> None:
        """Called by the parser, like all that follow."""
        if self._is_whole:
            raise ValueError("the engine answers more than it was asked")

    def on_header(self, name: bytes, _value: bytes) -> None:
        """Notes whether the answer says where it ends."""
        self._has_length = self._has_length or name.lower() in {b"content-length", b"transfer-encoding"}

    def on_headers_complete(self) -> None:
        """Notes the status."""
        self._status = self._parser.get_status_code()

    def on_body(self, piece: bytes) -> None:
        """Keeps a piece until all that arrived with it is read."""
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        """Notes the end; what comes before the answer proper, as 100 does, has none."""
        if self._status >= 200:
            self._is_whole = True
            self._is_reusable = self._parser.should_keep_alive()
        self._status = self._status if self._is_whole else 0

    def _read(self, data: bytes) -> None:
        self._parser.feed_data(data)
        if not self._status:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                raise ConnectionError("the head of the engine's answer is too long")
        if self._pieces:
            piece = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            self._pieces.clear()
            if self._status == 200:
                self._take(piece)
            else:
                self._refusal = (self._refusal + piece)[:HEAD_BYTES]
        if self._is_whole:
            self._end()

    def _end(self) -> None:
        if self._status == 200:
            self._take(b"")
        self._answered.set_result(None)

    def _fail(self, error: Exception) -> None:
        if not self._answered.done():
            self._answered.set_exception(error)
            # Nobody may wait for it any more: an exception that nobody fetches is no accident.
            self._answered.exception()

    def _look(self) -> None:
        # One that is begun for a request serves the next ones too, until it finds none.
        self._timer = None
        if self._answered.done():
            return
        left = self._heard_at + self._silence_seconds - self._loop.time()
        if left <= 0:
            self._fail(TimeoutError(f"the engine has said nothing for {self._silence_seconds:g} seconds"))
        else:
            self._timer = self._loop.call_later(left, self._look)
