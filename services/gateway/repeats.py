"""Repeats of an SDK: the same body again, because the first answer did not arrive. It is answered, not sampled, again.

OpenAI's clients count their tries in `x-stainless-retry-count`. A stored or running answer is given to at most one
repeat of each count, so that equal requests of an agent, all repeated after a restart, do not collapse into one answer.
A request with an `Idempotency-Key` is one request, however often it comes.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

from leyden.services.gateway.door import Door

CallT = TypeVar("CallT")
MAX_CLAIMS = 100_000


@dataclass(frozen=True, slots=True)
class Retry:
    """What the headers say of earlier tries: their number (0 for a first one), and the idempotency key or ''."""

    count: int
    key: str

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Self:
        """Reads the headers; a count that is no number is none."""
        count = headers.get("x-stainless-retry-count", "0")
        return cls(int(count) if count.isdecimal() and len(count) < 6 else 0, headers.get("idempotency-key", ""))

    @property
    def is_repeat(self) -> bool:
        """Whether an earlier try may have been answered."""
        return self.count > 0 or bool(self.key)


class Repeats(Generic[CallT]):
    """The calls in hand by attempt and body, and which answers have been given to which repeat."""

    def __init__(self) -> None:
        self._beginning: dict[tuple[str, int, bytes], list[asyncio.Event]] = {}
        self._in_hand: dict[tuple[str, int, bytes], list[tuple[str, CallT]]] = {}
        self._claims: OrderedDict[str, int] = OrderedDict()

    @contextmanager
    def beginning(self, door: Door, digest: bytes) -> Iterator[Sequence[asyncio.Event]]:
        """Around a request until it has a call, an answer or an error.

        Gives what is set when the equal requests before it have left. A repeat waits for them: whichever of them began
        a call, it finds that call.
        """
        key, left = (*door.key, digest), asyncio.Event()
        inside = self._beginning.setdefault(key, [])
        earlier = [*inside]
        inside.append(left)
        try:
            yield earlier
        finally:
            left.set()
            inside.remove(left)
            if not inside:
                del self._beginning[key]

    def add(self, door: Door, digest: bytes, request_id: str, call: CallT) -> None:
        """A call has begun."""
        self._in_hand.setdefault((*door.key, digest), []).append((request_id, call))

    def remove(self, door: Door, digest: bytes, call: CallT) -> None:
        """A call has ended; completed, it is found in the store."""
        key = (*door.key, digest)
        left = [entry for entry in self._in_hand.get(key, []) if entry[1] is not call]
        if left:
            self._in_hand[key] = left
        else:
            self._in_hand.pop(key, None)

    def join(self, door: Door, digest: bytes, retry: Retry) -> CallT | None:
        """The latest call in hand that this is a repeat of."""
        running = self._in_hand.get((*door.key, digest), [])
        return next((call for request_id, call in reversed(running) if self.claim(request_id, retry)), None)

    def claim(self, request_id: str, retry: Retry) -> bool:
        """Whether an answer may go to this repeat; it then goes to no other of the same count."""
        if retry.key:
            return True
        if self._claims.get(request_id, 0) >= retry.count:
            return False
        self._claims[request_id] = retry.count
        if len(self._claims) > MAX_CLAIMS:
            self._claims.popitem(last=False)
        return True
