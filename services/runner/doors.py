"""Watches whether gateway, collector and store answer, so that their absence is never told as an agent's failure.

A socket that a supervisor holds takes connections whether or not a process is behind it. So a look is a question, which
only a process answers, over a connection, which only its end cuts; the cut is seen as it happens.

The store is watched because doors hold requests while it is away, and then refuse them: such a refusal leaves no record
that would tell whose failure it was. They hold for longer than a look takes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

from leyden.libs.store.database import AWAY, cause
from leyden.libs.telemetry import RateLimitedLogger, logger

log = logger()
limited_log = RateLimitedLogger(log)

LOOK_SECONDS = 0.5
ANSWER_SECONDS = 5.0

_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class DoorWatch:
    """When the doors of agents, or the store behind them, did not answer.

    Args: ping_store: raises while the store does not answer
    """

    def __init__(self, urls: Sequence[str], ping_store: Callable[[], Awaitable[object]]) -> None:
        self._doors: list[_Door | _Store] = [*map(_Door, urls), _Store(ping_store)]

    async def keep(self) -> None:
        """Looks, for ever."""
        async with asyncio.TaskGroup() as group:
            for door in self._doors:
                group.create_task(door.keep())

    async def look(self) -> None:
        """Looks once more, beside what `keep` sees."""
        await asyncio.gather(*(door.look() for door in self._doors))

    def shut_since(self, moment: float) -> str | None:
        """A door that was shut at this moment of `time.monotonic` or later; None when all were open."""
        return next((door.name for door in self._doors if door.shut_at is not None and door.shut_at >= moment), None)


class _Door:
    """One address, and when it was last found shut."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or "127.0.0.1"
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self.name = f"{self._host}:{self._port}"
        self.shut_at: float | None = None

    async def keep(self) -> None:
        """Asks again and again over one connection; a new one after it was cut."""
        was_shut = False
        while True:
            with suppress(OSError, TimeoutError, EOFError):
                async with self._connected() as streams:
                    await _ask(*streams, self.name)
                    if was_shut:
                        # Until now, for attempts that began meanwhile.
                        self._note()
                    while not await _cut(streams[0]):
                        await _ask(*streams, self.name)
            self._note()
            was_shut = True
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Asks once over a connection of its own."""
        try:
            async with self._connected() as streams:
                await _ask(*streams, self.name)
        except (OSError, TimeoutError, EOFError):
            self._note()

    def _note(self) -> None:
        self.shut_at = time.monotonic()
        log.info("door shut", door=self.name)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[_Streams]:
        async with asyncio.timeout(ANSWER_SECONDS):
            reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            yield reader, writer
        finally:
            writer.close()


class _Store:
    """The store, and when it was last found away."""

    name = "the store"

    def __init__(self, ping: Callable[[], Awaitable[object]]) -> None:
        self._ping = ping
        self.shut_at: float | None = None

    async def keep(self) -> None:
        """Asks again and again."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Asks once."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._ping()
        except AWAY as error:
            # After the question, and so for attempts that began while it was asked.
            self.shut_at = time.monotonic()
            limited_log.warning("store away", cause=cause(error))


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str) -> None:
    """Raises: OSError, TimeoutError, EOFError: nobody answers"""
    async with asyncio.timeout(ANSWER_SECONDS):
        writer.write(f"HEAD / HTTP/1.1\r\nhost: {name}\r\n\r\n".encode())
        # Whatever the answer says, somebody gave it; one to HEAD has no body.
        await reader.readuntil(b"\r\n\r\n")


async def _cut(reader: asyncio.StreamReader) -> bool:
    """Whether the connection ends before it is time to ask again."""
    try:
        async with asyncio.timeout(LOOK_SECONDS):
            return await reader.read(1) == b""
    except TimeoutError:
        return False
