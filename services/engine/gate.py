"""A reader-writer lock between requests and weight updates, with a pause.

While generation is paused, new requests wait, and an update starts at once, without waiting for the requests in flight.
Otherwise an update waits for all requests in flight and makes new ones wait, as SGLang does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """The lock; use it on one event loop."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._in_flight = 0
        self._updating = False
        self._update_lock = asyncio.Lock()
        self.paused = False

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Encloses a request in flight; entering waits while paused or updating."""
        async with self._changed:
            await self._changed.wait_for(lambda: not (self.paused or self._updating))
            self._in_flight += 1
        try:
            yield
        finally:
            async with self._changed:
                self._in_flight -= 1
                self._changed.notify_all()

    @asynccontextmanager
    async def update(self) -> AsyncIterator[None]:
        """Encloses a weight update; one update at a time."""
        async with self._update_lock:
            async with self._changed:
                self._updating = True
            try:
                async with self._changed:
                    await self._changed.wait_for(lambda: self.paused or self._in_flight == 0)
                yield
            finally:
                async with self._changed:
                    self._updating = False
                    self._changed.notify_all()

    async def set_paused(self, paused: bool) -> None:
        async with self._changed:
            self.paused = paused
            self._changed.notify_all()
