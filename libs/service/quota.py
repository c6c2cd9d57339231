"""The most that one attempt may store: rows and bytes, counted where they are written.

A process counts what went through it, in memory, so that a limit costs no query. Each process of a service counts for
itself, and a process that starts again begins at zero: an attempt can store the limit once for each of them.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from cachetools import LRUCache

Key = TypeVar("Key", bound=Hashable)

ATTEMPTS = 65_536
"""Attempts that a process remembers, about 300 bytes each; the one that stored least recently begins again."""


class Amount(NamedTuple):
    """Rows and bytes."""

    rows: int = 0
    size_bytes: int = 0

    def plus(self, other: Amount) -> Amount:
        """The sum."""
        return Amount(self.rows + other.rows, self.size_bytes + other.size_bytes)


@dataclass(frozen=True, slots=True)
class Limit:
    """The most rows and bytes of one attempt. `settings` names the two settings, for the message."""

    most: Amount
    noun: str
    settings: tuple[str, str]

    def message(self) -> str:
        """The reason for people."""
        rows, size_bytes = self.settings
        return (
            f"this attempt may store {self.most.rows} {self.noun} ({rows}) of {self.most.size_bytes} bytes together"
            f" ({size_bytes}), and no more fit: send fewer or smaller ones"
        )

    def room(self, used: Amount, sizes: Sequence[int]) -> int:
        """The number of first items, by their sizes in bytes, that fit beside what is used."""
        rows, left = self.most.rows - used.rows, self.most.size_bytes - used.size_bytes
        for number, size in enumerate(sizes):
            left -= size
            if number >= rows or left < 0:
                return number
        return len(sizes)


class Quota(Generic[Key]):
    """Counts the rows that attempts have stored through this process.

    Args: stored: reads what an attempt has really stored, before anything is refused: a repeat counts twice here
    """

    def __init__(self, limit: Limit, stored: Callable[[Key], Awaitable[Amount]] | None = None) -> None:
        self.limit = limit
        self._stored = stored
        self._used: LRUCache[Key, Amount] = LRUCache(ATTEMPTS)
        self._waiting: defaultdict[Key, Amount] = defaultdict(Amount)
        self._is_full: LRUCache[Key, bool] = LRUCache(ATTEMPTS)
        self._reading: WeakValueDictionary[Key, asyncio.Lock] = WeakValueDictionary()

    def fitting(self, key: Key, sizes: Sequence[int]) -> int:
        """The number of the first of these items that the attempt may still store, by this process's own count."""
        return self.limit.room(self._counted(key), sizes)

    async def room(self, key: Key, sizes: Sequence[int]) -> int:
        """The same, but what was really stored is read before an item is refused.

        An attempt has one reader at a time, so that its requests at the limit leave the store's connections to others.
        """
        if self._stored is None or self.fitting(key, sizes) == len(sizes):
            return self.fitting(key, sizes)
        async with self._reading.setdefault(key, asyncio.Lock()):
            count = self.fitting(key, sizes)
            if count == len(sizes) or key in self._is_full:
                return count
            # A waiting row may be stored by now and counts twice: too much near the limit, never too little.
            self._used[key] = await self._stored(key)
            count = self.fitting(key, sizes)
            if not count:
                self._is_full[key] = True
            return count

    @contextmanager
    def storing(self, key: Key, sizes: Sequence[int]) -> Iterator[None]:
        """Counts items from now on, and for good if the block ends without an exception."""
        release = self.reserve(key, sizes)
        try:
            yield
            self._used[key] = self._used.get(key, Amount()).plus(_sum(sizes))
        finally:
            release()

    def reserve(self, key: Key, sizes: Sequence[int]) -> Callable[[], None]:
        """Counts items that are to come, until the function that it returns is called; again, it changes nothing."""
        amount, is_released = _sum(sizes), False
        self._waiting[key] = self._waiting[key].plus(amount)

        def release() -> None:
            nonlocal is_released
            if is_released:
                return
            is_released = True
            left = self._waiting[key]
            self._waiting[key] = Amount(left.rows - amount.rows, left.size_bytes - amount.size_bytes)
            if not self._waiting[key].rows:
                del self._waiting[key]

        return release

    def _counted(self, key: Key) -> Amount:
        return self._used.get(key, Amount()).plus(self._waiting.get(key, Amount()))


def _sum(sizes: Sequence[int]) -> Amount:
    return Amount(len(sizes), sum(sizes))
