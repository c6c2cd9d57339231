"""Watches whether gateway and collector answer, so that their absence is never told as an agent's failure."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from urllib.parse import urlsplit

from libs.telemetry import logger

log = logger()

LOOK_SECONDS = 0.5
ANSWER_SECONDS = 5.0
REMEMBERED_SECONDS = 24 * 3600.0


class DoorWatch:
    """When the doors of agents did not answer, as moments of `time.monotonic`.

    A gateway that is killed closes its listening port at once, and a start takes longer than `LOOK_SECONDS`: no outage
    that could break an agent is shorter than two looks.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._addresses = [_address(url) for url in urls]
        self._shut: deque[tuple[float, str]] = deque()

    async def keep(self) -> None:
        """Looks, for ever."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Looks once."""
        answers = await asyncio.gather(*(_answers(host, port) for host, port in self._addresses))
        now = time.monotonic()
        for (host, port), open_now in zip(self._addresses, answers, strict=True):
            if not open_now:
                self._shut.append((now, f"{host}:{port}"))
        while self._shut and self._shut[0][0] < now - REMEMBERED_SECONDS:
            self._shut.popleft()

    def shut_since(self, moment: float) -> str | None:
        """A door that did not answer at some look since the moment; None when all did."""
        return next((name for when, name in reversed(self._shut) if when >= moment), None)


async def _answers(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "127.0.0.1", parts.port or (443 if parts.scheme == "https" else 80)
