"""Bodies as bytes: read as they come, decompressed within a bound, counted against what the process may hold."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator

from leyden.libs.service.errors import Problem
from leyden.libs.service.limits import Share


async def read_body(
    chunks: AsyncIterator[bytes], encoding: str, share: Share, *, max_bytes: int, seconds: float | None = None
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
                share.acquire(len(part))
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
