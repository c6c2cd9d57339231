"""Checks whether gateway, collector and store answer, so that their absence never counts as an agent's failure.

A listening socket accepts connections even while no process serves it. So a check sends a request, which only a
process answers, over a connection that stays open: a process that dies cuts it, which the monitor notices at once.

The store is checked because gateway and collector hold requests while it is away, and then refuse them: such a refusal
leaves no record of whose failure it was. They hold for longer than a check takes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

from leyden.libs.store.database import StoreAway
from leyden.libs.telemetry import RateLimitedLogger, logger

log = logger()
limited_log = RateLimitedLogger(log)

CHECK_SECONDS = 0.5
ANSWER_SECONDS = 5.0
UNAUTHORIZED = 401


class EndpointMonitor:
    """Remembers when an endpoint of agents, or the store behind them, did not answer.

    Args: ping_store: raises while the store does not answer
    """

    def __init__(self, urls: Sequence[str], ping_store: Callable[[], Awaitable[object]]) -> None:
        self._endpoints: list[_Endpoint | _Store] = [*map(_Endpoint, urls), _Store(ping_store)]

    async def run(self) -> None:
        """Checks all the time."""
        async with asyncio.TaskGroup() as group:
            for endpoint in self._endpoints:
                group.create_task(endpoint.run())

    async def refuses_key(self, url: str, key: str) -> bool:
        """Returns whether the gateway answers 401 to an attempt's key: then it has other keys than this runner.

        Args: url: of a route that takes the key; key: bearer
        """
        with suppress(OSError, TimeoutError, EOFError, ValueError):
            return await _status(url, key) == UNAUTHORIZED
        return False

    async def check(self) -> None:
        """Checks once more, beside `run`."""
        await asyncio.gather(*(endpoint.check() for endpoint in self._endpoints))

    def down_since(self, moment: float) -> str | None:
        """An endpoint that was down at this moment of `time.monotonic` or later; None when all answered."""
        down = (one.name for one in self._endpoints if one.last_down is not None and one.last_down >= moment)
        return next(down, None)


class _Endpoint:
    """One address, and the last moment at which it did not answer."""

    def __init__(self, url: str) -> None:
        self._host, self._port = _host_and_port(url)
        self.name = f"{self._host}:{self._port}"
        self.last_down: float | None = None

    async def run(self) -> None:
        """Asks again and again over one connection; a new one after it was cut."""
        was_down = False
        while True:
            with suppress(OSError, TimeoutError, EOFError):
                async with self._answering() as streams:
                    if was_down:
                        # Until now, for attempts that started meanwhile.
                        self._mark_down()
                    while not await _cut(streams[0]):
                        await _ask(*streams, self.name)
            self._mark_down()
            was_down = True
            await asyncio.sleep(CHECK_SECONDS)

    async def check(self) -> None:
        """Asks once over a connection of its own."""
        try:
            async with self._answering():
                pass
        except (OSError, TimeoutError, EOFError):
            self._mark_down()

    def _mark_down(self) -> None:
        self.last_down = time.monotonic()
        log.info("endpoint down", endpoint=self.name)

    @asynccontextmanager
    async def _answering(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A connection over which one request was answered."""
        async with asyncio.timeout(ANSWER_SECONDS):
            reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            await _ask(reader, writer, self.name)
            yield reader, writer
        finally:
            writer.close()


class _Store:
    """The store, and the last moment at which it was away."""

    name = "the store"

    def __init__(self, ping: Callable[[], Awaitable[object]]) -> None:
        self._ping = ping
        self.last_down: float | None = None

    async def run(self) -> None:
        """Asks again and again."""
        while True:
            await self.check()
            await asyncio.sleep(CHECK_SECONDS)

    async def check(self) -> None:
        """Asks once."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._ping()
        except (StoreAway, TimeoutError) as error:
            # After the question, and so for attempts that started while it was asked.
            self.last_down = time.monotonic()
            limited_log.warning("store away", cause=str(error) or f"no answer within {ANSWER_SECONDS:g} s")


def _host_and_port(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "127.0.0.1", parts.port or (443 if parts.scheme == "https" else 80)


async def _status(url: str, key: str) -> int:
    """The status of the answer to GET. Raises: OSError, TimeoutError, EOFError, ValueError: there is none"""
    host, port = _host_and_port(url)
    async with asyncio.timeout(ANSWER_SECONDS):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            head = f"GET {urlsplit(url).path} HTTP/1.1\r\nhost: {host}:{port}\r\nconnection: close\r\n"
            writer.write(f"{head}authorization: Bearer {key}\r\n\r\n".encode())
            return int((await reader.readuntil(b"\r\n")).split()[1])
        finally:
            writer.close()


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str) -> None:
    """Raises: OSError, TimeoutError, EOFError: nobody answers"""
    async with asyncio.timeout(ANSWER_SECONDS):
        writer.write(f"HEAD / HTTP/1.1\r\nhost: {name}\r\n\r\n".encode())
        # Any answer proves a process; one to HEAD has no body.
        await reader.readuntil(b"\r\n\r\n")


async def _cut(reader: asyncio.StreamReader) -> bool:
    """Whether the connection ends before the next request is due."""
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            return await reader.read(1) == b""
    except TimeoutError:
        return False
