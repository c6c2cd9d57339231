"""Bounds on the bodies of requests: the size of one, and the bytes of all requests together.

Overloaded   the process has no room for another byte; the client should come again
"""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from prometheus_client import Gauge
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from leyden.libs.service.errors import Problem

BODY_BYTES = Gauge("leyden_body_bytes", "Bytes of request bodies in this process's memory.")

RESERVED_FILES = 256
"""Descriptors for everything that is no connection."""


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


def header(scope: Scope, name: bytes) -> str | None:
    """The first header of this lower-case name."""
    for given, value in scope["headers"]:
        if given == name:
            return str(value, "latin-1")
    return None


def _too_large(limit: int) -> Problem:
    return Problem(413, f"the body exceeds {limit} bytes", cause="too_large")
