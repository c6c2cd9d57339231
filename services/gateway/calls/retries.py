"""Indexes the calls in flight, so that an SDK's retry joins the call that its first try started.

OpenAI's clients count their tries in `x-stainless-retry-count`. A stored or running answer goes to at most one retry of
each count, so that equal requests of an agent, all retried after a restart, get an answer each. Requests with the same
`Idempotency-Key` and body get one answer. Other clients repeat without a word: ADR 21 says which of their requests are
repeats.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

from cachetools import LRUCache, TTLCache

from leyden.libs.store.attempts import AttemptKey
from leyden.services.gateway.calls.context import CallContext, Completion, SampledTokens
from leyden.services.gateway.errors import stopping
from leyden.services.gateway.records.deliveries import Delivery
from leyden.services.gateway.samplers.base import Sampler

RequestKey = tuple[AttemptKey, bytes]
"""An attempt and the digest of a body."""
MAX_CLAIMS = 100_000
REPEAT_SECONDS = 120.0
"""A request repeats a call whose answer did not arrive if it has the same body and comes within this time."""


@dataclass(slots=True, eq=False)
class InFlightCall:
    """One request to the model until it is recorded."""

    context: CallContext
    choices: list[SampledTokens]
    sampler: Sampler
    delivery: Delivery
    task: asyncio.Task[Completion] | None = None
    listeners: list[Callable[[], None]] = field(default_factory=list)
    abandoned_seconds: float = 0.0
    """How long the call goes on without a listener."""
    gives_up: asyncio.TimerHandle | None = None
    is_taken: bool = False
    """Whether a repeat joined it and does not listen yet."""
    release_room: Callable[[], None] = lambda: None
    """Ends the reservation of its rows: before they are recorded, and at its end."""
    is_recorded: bool = False
    recorded_at: float | None = None
    has_attempt_ended: bool = False
    """The client then gets 403, even if the call completes."""

    @property
    def request_id(self) -> str:
        """The `id` field of the answer."""
        return self.context.request_id

    @property
    def created(self) -> int:
        """Arrival in seconds since the epoch."""
        return self.context.sequence // 1_000_000_000

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.context.prompt.ids)

    @property
    def may_complete(self) -> bool:
        """Whether the call runs and is not being cancelled."""
        return self.task is not None and not self.task.cancelling()

    @property
    def is_abandoned(self) -> bool:
        """Whether the call runs on though all its clients have left, and no repeat has joined it since."""
        return self.gives_up is not None and self.may_complete and not self.is_taken

    @contextmanager
    def listening(self, on_progress: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Calls `on_progress` after new tokens and at the end.

        A call that its last listener leaves early is cancelled unless a retry joins it within `abandoned_seconds`.
        """
        self.listeners.append(on_progress)
        self._heard()
        try:
            yield
        finally:
            self.listeners.remove(on_progress)
            self.abandon()

    def _heard(self) -> None:
        if self.gives_up is not None:
            self.gives_up.cancel()
            self.gives_up = None
        self.is_taken = False
        self.delivery.left_at = None

    def abandon(self) -> None:
        """Begins the grace of a call that runs without a listener."""
        self.is_taken = False
        if self.listeners or self.gives_up is not None or self.task is None or self.task.done():
            return
        self.delivery.left_at = self.delivery.left_at or time.perf_counter()
        if self.abandoned_seconds == 0:
            # At once, so that no repeat joins a call that is about to be cancelled.
            self.task.cancel()
            return
        self.gives_up = asyncio.get_running_loop().call_later(self.abandoned_seconds, self.task.cancel)

    def joined(self) -> Self:
        """Begins the grace of an abandoned call again: the request that joins it does not listen yet."""
        if self.gives_up is not None:
            self.gives_up.cancel()
            self.gives_up = None
            self.abandon()
            self.is_taken = True
        return self

    def waited_seconds(self) -> float:
        """How long the client has waited for the platform: for an engine, also one that stops in the middle of an
        answer, and for the record of the answer.

        Sampling is no wait. A client that left before any token is known of waited for all of its time.
        """
        arrived, until = self.delivery.arrived_at, self.delivery.left_at or time.perf_counter()
        accepted = [choice.accepted_at for choice in self.choices if choice.accepted_at is not None]
        if len(accepted) < len(self.choices) or max(accepted) >= until:
            return until - arrived
        ended = max((choice.ended_at or until for choice in self.choices), default=until)
        waits = (
            (choice.accepted_at or until) - arrived + choice.stalls.seconds(min(until, choice.ended_at or until))
            for choice in self.choices
        )
        return max(waits) + max(0.0, min(until, self.recorded_at or until) - ended)

    def progressed(self) -> None:
        """Notifies every listener."""
        for listener in self.listeners:
            listener()

    def result(self) -> Completion:
        """Returns the answer of an ended call. Raises: GatewayError."""
        assert self.task is not None
        if self.task.cancelled():
            raise stopping()
        return self.task.result()


@dataclass(frozen=True, slots=True)
class Retry:
    """The number of earlier tries (0 for a first one), and the idempotency key or ''."""

    count: int
    key: str

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Self:
        """Reads the headers; a count that is no number counts as 0."""
        count = headers.get("x-stainless-retry-count", "0")
        return cls(int(count) if count.isdecimal() and len(count) < 6 else 0, headers.get("idempotency-key", ""))

    @property
    def may_be_answered(self) -> bool:
        """Whether an answer to an earlier try may exist."""
        return self.count > 0 or bool(self.key)


UNDECLARED = Retry(1, "")
"""A repeat that does not say so."""


class RetryIndex:
    """The calls in flight by attempt and body, and the highest retry count that got each answer."""

    def __init__(self) -> None:
        self._starting: defaultdict[RequestKey, list[asyncio.Event]] = defaultdict(list)
        self._in_flight: defaultdict[RequestKey, list[tuple[str, InFlightCall]]] = defaultdict(list)
        self._claims: LRUCache[str, int] = LRUCache(MAX_CLAIMS)
        self.undelivered: TTLCache[RequestKey, str] = TTLCache(MAX_CLAIMS, REPEAT_SECONDS)
        """The newest request whose client hung up before the end of its answer, by attempt and body."""

    @contextmanager
    def starting(self, key: RequestKey) -> Iterator[Sequence[asyncio.Event]]:
        """Marks a request as starting until it has a call, an answer or an error.

        Yields one event for each equal request that is starting; each is set when its request leaves the block. A retry
        waits for these events, then finds the call that one of the requests started.
        """
        left = asyncio.Event()
        inside = self._starting[key]
        earlier = [*inside]
        inside.append(left)
        try:
            yield earlier
        finally:
            left.set()
            inside.remove(left)
            if not inside:
                del self._starting[key]

    def add(self, key: RequestKey, request_id: str, call: InFlightCall) -> None:
        """Registers a call in flight."""
        self._in_flight[key].append((request_id, call))

    def remove(self, key: RequestKey, call: InFlightCall) -> None:
        """Removes an ended call; a completed one is in the store."""
        self._in_flight[key] = [entry for entry in self._in_flight[key] if entry[1] is not call]
        if not self._in_flight[key]:
            del self._in_flight[key]

    def join(self, key: RequestKey, retry: Retry) -> InFlightCall | None:
        """Returns the latest call in flight that this retry may share, preferably one whose clients have left."""
        running = sorted(self._in_flight.get(key, []), key=lambda entry: entry[1].is_abandoned)
        return next((call for request_id, call in reversed(running) if self.claim(request_id, retry)), None)

    def join_abandoned(self, key: RequestKey) -> InFlightCall | None:
        """Returns the latest call in flight whose clients have all left; no later repeat gets it as well."""
        running = self._in_flight.get(key, [])
        found = next((call for _, call in reversed(running) if call.is_abandoned), None)
        if found is None:
            return None
        self.found(key, found.request_id)
        return found.joined()

    def found(self, key: RequestKey, request_id: str) -> None:
        """Notes that a client has this answer, or waits for it again: a later equal request is one of its own."""
        if self.undelivered.get(key) == request_id:
            del self.undelivered[key]

    def claim(self, request_id: str, retry: Retry) -> bool:
        """Returns whether an answer may go to this retry, and reserves it: no other retry of that count gets it."""
        if retry.key:
            return True
        if self._claims.get(request_id, 0) >= retry.count:
            return False
        self._claims[request_id] = retry.count
        return True

    def repeats(self, key: RequestKey, lost: str | None, request_id: str) -> bool:
        """Returns whether a stored answer may go to a repeat that does not say so, and reserves it.

        Args: lost: the request whose answer did not arrive; None where a gateway that died had it
        """
        if lost is None:
            return self.claim(request_id, UNDECLARED)
        # Each loss is repeated once, however often the answer was lost before.
        if lost != request_id or self.undelivered.get(key) != lost:
            return False
        del self.undelivered[key]
        return True
