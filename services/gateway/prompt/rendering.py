"""Renders off the event loop: in few threads, one prompt of an attempt at a time, within a limit of CPU time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import ParamSpec, TypeVar
from weakref import WeakValueDictionary

from leyden.services.gateway.prompt.sandbox import cpu_limit

P = ParamSpec("P")
T = TypeVar("T")
THREADS = 2
"""Prompts that are rendered at once. Python runs one of them at a time, so more threads would only delay the loop."""


class Rendering:
    """The renderings of one prompt. Their CPU time together is limited, whatever else the machine does."""

    def __init__(self, threads: ThreadPoolExecutor, seconds: float) -> None:
        self._threads = threads
        self._seconds = self._left = seconds

    def anew(self) -> Rendering:
        """The same with a limit of its own, for work that no single prompt asks for."""
        return Rendering(self._threads, self._seconds)

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a function that renders. Raises: BadRequest: the time is up, or whatever the function raises."""
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, self._timed, partial(work, *args, **kwargs)
        )

    def _timed(self, work: Callable[[], T]) -> T:
        begun = time.thread_time()
        try:
            with cpu_limit(max(0.0, self._left), of=self._seconds):
                return work()
        finally:
            self._left -= time.thread_time() - begun


class Renderer:
    """Threads that render. An attempt has one of them at a time, so that its slow prompts delay no other attempt."""

    def __init__(self, seconds: float = 2.0) -> None:
        self._seconds = seconds
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="render")
        self._turns: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def prompt(self, key: Hashable) -> AsyncIterator[Rendering]:
        """Waits for the attempt's turn and gives the renderings of one prompt."""
        turn = self._turns.get(key)
        if turn is None:
            turn = self._turns[key] = asyncio.Lock()
        async with turn:
            yield Rendering(self._threads, self._seconds)

    def close(self) -> None:
        """Ends the threads after what they render."""
        self._threads.shutdown(wait=False, cancel_futures=True)
