"""What has begun goes first: requests begin one at a time, a few turns of the event loop apart.

Begun as they come, all requests in hand would share the processor: in a crowd each would take as long as the whole
crowd, and keep its memory as long. So the last steps of earlier requests come before the first step of the next one.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

TURNS_APART = 4
"""A request goes from one step to the next within so many turns, each of which takes microseconds where nothing else
is to be done."""
SECONDS_APART = 0.005
"""The longest that a request waits for the one before it, where turns take long."""


class Turns:
    """The order in which the requests of one event loop begin: as they came."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], object]] = deque()
        self._left = 0
        self._until = 0.0

    def take(self, begin: Callable[[], object]) -> None:
        """Calls `begin` when its turn has come, which may be at once."""
        if self._left:
            self._waiting.append(begin)
        else:
            self._begin(begin)

    def _begin(self, begin: Callable[[], object]) -> None:
        self._left, self._until = TURNS_APART, time.perf_counter() + SECONDS_APART
        self._loop.call_soon(self._turn)
        begin()

    def _turn(self) -> None:
        self._left = self._left - 1 if time.perf_counter() < self._until else 0
        if self._left:
            self._loop.call_soon(self._turn)
        elif self._waiting:
            self._begin(self._waiting.popleft())
