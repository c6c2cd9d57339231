"""Bodies as bytes: read as they come, decompressed within a bound, counted against what the process may hold."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from prometheus_client import Gauge

from libs.service import Problem

BYTES_IN_FLIGHT = Gauge("collector_in_flight_bytes", "Bytes of requests that are not yet durable.")


class Overloaded(Exception):
    """The process holds as much as it may; the client is to come again."""


class Budget:
    """Bytes that all requests together may hold."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._held = 0

    @contextmanager
    def share(self) -> Iterator[Share]:
        """One request's part of the budget, given back when the block ends."""
        share = Share(self)
        try:
            yield share
        finally:
            self._change(-share.bytes)

    def _change(self, size_bytes: int) -> None:
        self._held += size_bytes
        BYTES_IN_FLIGHT.set(self._held)

    def take(self, size_bytes: int) -> None:
        """Raises: Overloaded: the budget has no room for so much."""
        if self._held + size_bytes > self._limit:
            raise Overloaded
        self._change(size_bytes)


class Share:
    """What one request holds of a budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.bytes = 0

    def take(self, size_bytes: int) -> None:
        """Raises: Overloaded: the budget has no room for so much."""
        self._budget.take(size_bytes)
        self.bytes += size_bytes


async def read_body(
    chunks: AsyncIterator[bytes], encoding: str, share: Share, *, max_bytes: int, seconds: float
) -> bytes:
    """A request's body, decompressed, with every byte counted against the share before it is kept.

    Raises: Overloaded; Problem: 400 broken gzip, 408 too slow, 413 beyond `max_bytes`, 415 an unknown encoding
    """
    if encoding not in {"", "identity", "gzip"}:
        raise Problem(415, f"content-encoding {encoding!r}: send gzip or none", cause="encoding_unknown")
    parts: list[bytes] = []
    size = 0
    inflate = _Gunzip(max_bytes) if encoding == "gzip" else None
    try:
        async with asyncio.timeout(seconds):
            async for chunk in chunks:
                part = inflate.feed(chunk) if inflate is not None else chunk
                size += len(part)
                if size > max_bytes:
                    raise Problem(413, f"the body exceeds {max_bytes} bytes", cause="too_large")
                share.take(len(part))
                parts.append(part)
    except TimeoutError as error:
        raise Problem(408, f"the body did not arrive within {seconds:g} s", cause="too_slow") from error
    if inflate is not None and size + len(parts) and not inflate.complete:
        raise Problem(400, "the gzip stream ends early", cause="gzip_broken")
    return b"".join(parts)


class _Gunzip:
    """Decompresses piece by piece and stops one byte after the bound: a bomb costs the bound, not its size.

    A body may have several members one after another (RFC 1952 2.2); whatever follows them is no gzip.
    """

    def __init__(self, max_bytes: int) -> None:
        self._stream = zlib.decompressobj(wbits=31)
        self._left = max_bytes + 1

    @property
    def complete(self) -> bool:
        return self._stream.eof

    def feed(self, chunk: bytes) -> bytes:
        parts: list[bytes] = []
        while chunk and self._left > 0:
            if self._stream.eof:
                self._stream = zlib.decompressobj(wbits=31)
            try:
                parts.append(self._stream.decompress(chunk, self._left))
            except zlib.error as error:
                raise Problem(400, f"not gzip: {error}", cause="gzip_broken") from error
            self._left -= len(parts[-1])
            chunk = self._stream.unused_data
        return b"".join(parts)
