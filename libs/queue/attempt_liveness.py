"""Checks whether an attempt still runs: gateway and collector check every request, mostly from a cache.

A confirmed attempt stays confirmed for `CACHE_TTL_SECONDS`. Before that time is over, one statement polls all attempts
with recent requests, so that requests do not wait. A notification of an end causes a poll at once; without Redis an
ended attempt's key stays valid for at most the cache's time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from prometheus_client import Counter

from leyden.libs.queue.notifications import Notifications
from leyden.libs.queue.store_clock import StoreClock
from leyden.libs.store.attempts import AttemptKey, running_attempts
from leyden.libs.store.database import Database, StoreAway
from leyden.libs.telemetry import RateLimitedLogger, logger

CACHE_TTL_SECONDS = 5.0
IDLE_SECONDS = 600.0
"""An attempt without requests and running calls for this long leaves the cache."""
ANSWER_SECONDS = 3.0
"""A store that does not answer within this time counts as down."""
RETRY_SECONDS = 0.25
MAX_ENDED = 10_000
"""Size of the cache of ended attempts, which saves queries for agents that continue to send requests."""

POLLS = Counter("leyden_attempt_polls_total", "Statements that polled which attempts run.", ["result"])

log = logger()
limited_log = RateLimitedLogger(log)


class AttemptEnded(Exception):
    """The attempt was settled, expired or cancelled, so its key is no longer valid."""


class AttemptLiveness:
    """A cache of the attempts that run.

    Args: hold_seconds: how long an agent's request waits while the store is down; has_calls: whether calls of an
        attempt still run, which must hear of its end; on_end: called with each confirmed attempt that has ended
    """

    def __init__(
        self,
        database: Database,
        notifications: Notifications,
        *,
        hold_seconds: float = 0.0,
        has_calls: Callable[[AttemptKey], bool] = lambda _: False,
        on_end: Callable[[AttemptKey], None] = lambda _: None,
    ) -> None:
        self._database = database
        self._notifications = notifications
        self._hold_seconds = hold_seconds
        self._has_calls = has_calls
        self._on_end = on_end
        self._confirmed_until: dict[AttemptKey, float] = {}
        self._called_at: dict[AttemptKey, float] = {}
        self._ended: dict[AttemptKey, None] = {}
        self._stale: set[AttemptKey] = set()
        self._waiting: dict[AttemptKey, asyncio.Future[bool]] = {}
        self._poll_now = asyncio.Event()
        self.clock = StoreClock()
        """It has been read before any attempt is confirmed."""

    async def start(self) -> None:
        """Reads the store's clock; if the store is down, the first poll reads it."""
        with suppress(StoreAway, TimeoutError):
            await self._running(set())

    def is_confirmed(self, rollout_id: str, attempt: int) -> bool:
        """Whether `confirm` would return at once."""
        return self._confirmed_until.get(AttemptKey(rollout_id, attempt), 0.0) > time.monotonic()

    async def confirm(self, rollout_id: str, attempt: int) -> None:
        """Returns if the attempt runs.

        Raises: AttemptEnded; StoreAway: the store does not answer, try again
        """
        key, now = AttemptKey(rollout_id, attempt), time.monotonic()
        if key in self._ended:
            raise AttemptEnded
        self._called_at[key] = now
        if self._confirmed_until.get(key, 0.0) <= now and not await self._ask(key):
            raise AttemptEnded

    async def run(self) -> None:
        """Polls the store and receives notifications until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._poll())
            group.create_task(self._listen())

    async def _ask(self, key: AttemptKey) -> bool:
        deadline = time.monotonic() + self._hold_seconds
        while True:
            # Requests of one attempt share the answer.
            answer = self._waiting.setdefault(key, asyncio.get_running_loop().create_future())
            self._poll_now.set()
            try:
                return await asyncio.shield(answer)
            except StoreAway:
                if time.monotonic() >= deadline:
                    raise
                await asyncio.sleep(RETRY_SECONDS)

    async def _poll(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(CACHE_TTL_SECONDS / 4):
                    await self._poll_now.wait()
            self._poll_now.clear()
            self._drop_idle()
            keys = self._due()
            if not keys:
                continue
            self._stale.clear()
            started = time.monotonic()
            try:
                running = await self._running(keys)
            except (StoreAway, TimeoutError) as error:
                reason = str(error) or f"no answer within {ANSWER_SECONDS:g} s"
                limited_log.warning("attempts not polled", cause=reason)
                await self._fail(keys)
            # The loop must survive every error: without it all requests would wait for ever.
            except Exception:
                log.exception("attempts not polled")
                await self._fail(keys)
            else:
                POLLS.labels("done").inc()
                self._apply(keys, running, started)

    async def _running(self, keys: set[AttemptKey]) -> set[AttemptKey]:
        async with asyncio.timeout(ANSWER_SECONDS), self._database.read() as session:
            await self.clock.read(session)
            return await running_attempts(session, keys) if keys else set()

    def _due(self) -> set[AttemptKey]:
        soon = time.monotonic() + CACHE_TTL_SECONDS / 2
        return {*self._waiting, *(key for key, until in self._confirmed_until.items() if until <= soon)}

    def _apply(self, keys: Iterable[AttemptKey], running: set[AttemptKey], started: float) -> None:
        for key in keys:
            if key in self._stale:
                # A notification arrived during the poll, so the answer may be outdated. The next poll repeats it.
                continue
            if key in running:
                self._confirmed_until[key] = started + CACHE_TTL_SECONDS
            else:
                self._end(key)
            answer = self._waiting.pop(key, None)
            if answer is not None:
                answer.set_result(key in running)

    def _end(self, key: AttemptKey) -> None:
        if self._confirmed_until.pop(key, None) is not None:
            self._on_end(key)
        self._called_at.pop(key, None)
        self._ended[key] = None
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    async def _fail(self, keys: Iterable[AttemptKey]) -> None:
        POLLS.labels("failed").inc()
        for key in keys:
            answer = self._waiting.pop(key, None)
            if answer is not None:
                answer.set_exception(StoreAway("nobody can say whether the attempt runs"))
                # The caller may have disconnected: reading the exception avoids asyncio's "never retrieved" warning.
                answer.exception()
        await asyncio.sleep(RETRY_SECONDS)

    def _drop_idle(self) -> None:
        idle = time.monotonic() - IDLE_SECONDS
        for key in [key for key, called in self._called_at.items() if called < idle and key not in self._waiting]:
            if self._has_calls(key):
                continue
            del self._called_at[key]
            self._confirmed_until.pop(key, None)

    async def _listen(self) -> None:
        async for ended in self._notifications.ended():
            for key in list(self._confirmed_until if ended is None else ended):
                if key in self._confirmed_until or key in self._waiting:
                    self._confirmed_until[key] = 0.0
                    self._stale.add(key)
                    self._poll_now.set()
