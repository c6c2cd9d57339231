"""Whether an attempt still runs, as its doors ask with every call of an agent; most answers cost no query.

The store's answer is cached for `CACHE_TTL_SECONDS`. For attempts whose agents call, one statement asks again before
that time is over, so calls never wait for it. Ends are announced over Redis and make the doors ask
at once; with Redis away a key outlives its attempt by the belief at most.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from prometheus_client import Counter

from leyden.libs.queue.notifications import Notifications
from leyden.libs.store.attempts import AttemptKey, running_attempts
from leyden.libs.store.calls import StoreAway, reading
from leyden.libs.store.database import Database
from leyden.libs.telemetry import RateLimitedLogger, logger

CACHE_TTL_SECONDS = 5.0
IDLE_SECONDS = 600.0
"""An attempt that did not call for so long is forgotten, and asked about when it calls again. Longer than a call."""
POLL_SECONDS = 3.0
"""A store that does not answer a look within this time is away."""
RETRY_SECONDS = 0.25
MAX_ENDED = 10_000
"""Ends that are remembered, so that an agent which goes on calling costs no queries."""

LOOKS = Counter("leyden_attempt_looks_total", "Statements that asked which attempts run.", ["result"])

log = logger()
limited_log = RateLimitedLogger(log)


class AttemptEnded(Exception):
    """The attempt was settled, expired or cancelled; it never runs again."""


class AttemptLiveness:
    """Which attempts run.

    Args: hold_seconds: how long an agent's call waits for a store that is away; on_end: told of each attempt that was
        believed to run and has ended
    """

    def __init__(
        self,
        database: Database,
        notifications: Notifications,
        *,
        hold_seconds: float = 0.0,
        on_end: Callable[[AttemptKey], None] = lambda _: None,
    ) -> None:
        self._database = database
        self._notifications = notifications
        self._hold_seconds = hold_seconds
        self._on_end = on_end
        self._believed: dict[AttemptKey, float] = {}
        self._used: dict[AttemptKey, float] = {}
        self._ended: dict[AttemptKey, None] = {}
        self._doubted: set[AttemptKey] = set()
        self._waiting: dict[AttemptKey, asyncio.Future[bool]] = {}
        self._wanted = asyncio.Event()

    async def confirm(self, rollout_id: str, attempt: int) -> None:
        """Returns when the attempt runs.

        Raises: AttemptEnded; StoreAway: nothing is known, ask again
        """
        key, now = AttemptKey(rollout_id, attempt), time.monotonic()
        if key in self._ended:
            raise AttemptEnded
        self._used[key] = now
        if self._believed.get(key, 0.0) <= now and not await self._asked(key):
            raise AttemptEnded

    async def run(self) -> None:
        """Asks and listens until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._look())
            group.create_task(self._listen())

    async def _asked(self, key: AttemptKey) -> bool:
        deadline = time.monotonic() + self._hold_seconds
        while True:
            # Calls that ask about one attempt share the answer.
            answer = self._waiting.setdefault(key, asyncio.get_running_loop().create_future())
            self._wanted.set()
            try:
                return await asyncio.shield(answer)
            except StoreAway:
                if time.monotonic() >= deadline:
                    raise
                await asyncio.sleep(RETRY_SECONDS)

    async def _look(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(CACHE_TTL_SECONDS / 4):
                    await self._wanted.wait()
            self._wanted.clear()
            self._forget()
            keys = self._due()
            if not keys:
                continue
            self._doubted.clear()
            began = time.monotonic()
            try:
                running = await self._running(keys)
            except (StoreAway, TimeoutError) as error:
                limited_log.warning(
                    "attempts not looked up", cause=str(error) or f"no answer within {POLL_SECONDS:g} s"
                )
                await self._fail(keys)
            # The loop must live: without it every call would wait for ever.
            except Exception:
                log.exception("attempts not looked up")
                await self._fail(keys)
            else:
                LOOKS.labels("done").inc()
                self._learn(keys, running, began)

    async def _running(self, keys: Iterable[AttemptKey]) -> set[AttemptKey]:
        async with asyncio.timeout(POLL_SECONDS), reading(self._database) as session:
            return await running_attempts(session, keys)

    def _due(self) -> set[AttemptKey]:
        soon = time.monotonic() + CACHE_TTL_SECONDS / 2
        return {*self._waiting, *(key for key, until in self._believed.items() if until <= soon)}

    def _learn(self, keys: Iterable[AttemptKey], running: set[AttemptKey], began: float) -> None:
        for key in keys:
            if key in self._doubted:
                # An end was announced while the store was asked: its answer may be older. Asked again at once.
                continue
            if key in running:
                self._believed[key] = began + CACHE_TTL_SECONDS
            else:
                self._end(key)
            answer = self._waiting.pop(key, None)
            if answer is not None:
                answer.set_result(key in running)

    def _end(self, key: AttemptKey) -> None:
        if self._believed.pop(key, None) is not None:
            self._on_end(key)
        self._used.pop(key, None)
        self._ended[key] = None
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    async def _fail(self, keys: Iterable[AttemptKey]) -> None:
        LOOKS.labels("failed").inc()
        for key in keys:
            answer = self._waiting.pop(key, None)
            if answer is not None:
                answer.set_exception(StoreAway("nobody can say whether the attempt runs"))
                # Who waited may have hung up: an exception that nobody fetches is no accident.
                answer.exception()
        await asyncio.sleep(RETRY_SECONDS)

    def _forget(self) -> None:
        idle = time.monotonic() - IDLE_SECONDS
        for key in [key for key, used in self._used.items() if used < idle and key not in self._waiting]:
            del self._used[key]
            self._believed.pop(key, None)

    async def _listen(self) -> None:
        async for ended in self._notifications.ends():
            self._doubt(self._believed.keys() if ended is None else ended)

    def _doubt(self, attempts: Iterable[AttemptKey]) -> None:
        for key in list(attempts):
            if key in self._believed or key in self._waiting:
                self._believed[key] = 0.0
                self._doubted.add(key)
                self._wanted.set()
