"""The store's clock, which all machines share: a machine's own may be wrong, and may jump."""

from __future__ import annotations

import math
import time

from sqlalchemy import text

from leyden.libs.store.database import ReadSession

_NOW = text("SELECT extract(epoch FROM clock_timestamp())::float8")


class StoreClock:
    """Seconds since the epoch by the store's clock.

    A statement bounds how far that clock is ahead of `time.monotonic`: it read the clock after it was sent and before
    its answer came. The bounds of all readings count together, so that the quickest one is the error; one that
    contradicts them begins anew, because a clock was set, or drifted.
    """

    def __init__(self) -> None:
        self._least, self._most = -math.inf, math.inf

    async def read(self, session: ReadSession) -> None:
        """Reads the store's clock."""
        before = time.monotonic()
        moment = await session.scalar(_NOW)
        self.add(moment, before, time.monotonic())

    def add(self, moment: float, before: float, after: float) -> None:
        """Adds a reading that was made between two moments of `time.monotonic`."""
        least, most = max(self._least, moment - after), min(self._most, moment - before)
        self._least, self._most = (least, most) if least <= most else (moment - after, moment - before)

    def now(self) -> float:
        """Returns the time; 0 before the first reading."""
        return 0.0 if math.isinf(self._least) else (self._least + self._most) / 2 + time.monotonic()
