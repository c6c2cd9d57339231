"""What all requests of a process together may hold in memory: a bound on one body alone is none on thousands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import Gauge

HELD_BYTES = Gauge("leyden_body_bytes", "Bytes of requests' bodies that this process holds.")


class Overloaded(Exception):
    """The process holds as much as it may; the client is to come again."""


class Budget:
    """Bytes that all requests together may hold."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._held = 0

    @contextmanager
    def share(self) -> Iterator[Share]:
        """One request's part of the budget, given back when the block ends."""
        share = Share(self)
        try:
            yield share
        finally:
            self._change(-share.bytes)

    def _change(self, size_bytes: int) -> None:
        self._held += size_bytes
        HELD_BYTES.set(self._held)

    def take(self, size_bytes: int) -> None:
        """Raises: Overloaded: the budget has no room for so much."""
        if self._held + size_bytes > self._limit:
            raise Overloaded
        self._change(size_bytes)


class Share:
    """What one request holds of a budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.bytes = 0

    def take(self, size_bytes: int) -> None:
        """Raises: Overloaded: the budget has no room for so much."""
        self._budget.take(size_bytes)
        self.bytes += size_bytes
