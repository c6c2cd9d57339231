"""A timer that each event of a stream puts off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Silence:
    """Wakes a listener that has waited for some time.

    Why: a timeout for each token took 7 % of the CPU of a streamed token, on each side of the gateway. This timer stays
    where it is put off, and compares the time when it fires.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, seconds: float) -> None:
        """Puts the end off to so many seconds from now."""
        self._ends_at = self._loop.time() + seconds
        if self._timer is None or self._ends_at < self._timer.when():
            self.close()
            self._timer = self._loop.call_at(self._ends_at, self._look)

    @property
    def is_over(self) -> bool:
        """Whether the time has passed."""
        return self._loop.time() >= self._ends_at

    def _look(self) -> None:
        self._timer = None if self.is_over else self._loop.call_at(self._ends_at, self._look)
        if self._timer is None:
            self._wake()

    def close(self) -> None:
        """Ends the timer."""
        if self._timer is not None:
            self._timer.cancel()
