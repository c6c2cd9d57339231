"""One request for all that wait: a poll whose answer everyone shares."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedPoll(Generic[T]):
    """Fetches again and again while somebody waits, so that n waiters cost one request a poll.

    Args: fetch: the request; pause_seconds: the pause before it.
    """

    def __init__(self, fetch: Callable[[], Awaitable[T]], pause_seconds: float) -> None:
        self._fetch = fetch
        self._pause_seconds = pause_seconds
        self._next: asyncio.Task[T] | None = None

    async def next(self) -> T:
        """Waits for the next answer. Raises: the error of the request"""
        if self._next is None or self._next.done():
            self._next = asyncio.create_task(self._poll())
        # Why shielded: one waiter's cancellation concerns no other.
        return await asyncio.shield(self._next)

    async def close(self) -> None:
        """Stops a poll for which nobody waits any more."""
        if self._next is not None:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)

    async def _poll(self) -> T:
        await asyncio.sleep(self._pause_seconds)
        return await self._fetch()
