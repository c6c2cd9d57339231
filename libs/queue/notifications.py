"""Notifications over Redis: hints that something changed in Postgres, so that nobody has to poll often.

A lost notification costs a poll interval. Each topic is a stream of one entry. A waiter reads from the place where it
stopped, so it misses no notification given while it worked, and nobody holds a connection while nobody waits.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from enum import StrEnum
from typing import Any

from pydantic import TypeAdapter, ValidationError
from redis.asyncio import Redis
from redis.exceptions import RedisError

from leyden.libs.queue.connection import CONNECT_SECONDS, MAX_BLOCK_SECONDS, QueueUnavailable, answering, connect
from leyden.libs.store.attempts import AttemptKey
from leyden.libs.telemetry import RateLimitedLogger, logger

RECONNECT_SECONDS = 1.0
SEND_SECONDS = 1.0
"""Longest time that sending a notification may take: work goes on without it."""
AWAY_SECONDS = 5.0
"""Pause after a notification that Redis did not accept, so that a silent Redis slows nobody down."""
_ENDED = "{leyden:notify}:ended"

limited_log = RateLimitedLogger(logger())
_ENDED_ATTEMPTS: TypeAdapter[list[AttemptKey] | None] = TypeAdapter(list[AttemptKey] | None)


class Topic(StrEnum):
    """The kinds of rows that may have changed."""

    ROLLOUTS = "rollouts"
    OUTCOMES = "outcomes"
    GROUPS = "groups"
    SAMPLES = "samples"
    VERSIONS = "versions"
    RUNS = "runs"
    ENGINES = "engines"


class Notifications:
    """Sends and awaits notifications. Nothing here raises when Redis is away: sending does nothing, waiting sleeps."""

    def __init__(self, url: str) -> None:
        self._redis: Redis = connect(url)
        self._positions: dict[str, str] = {}
        self._away_until = 0.0

    async def notify(self, *topics: Topic) -> None:
        """Wakes everybody who waits for one of the topics. Call it after the commit."""

        async def send() -> None:
            async with self._redis.pipeline(transaction=False) as pipeline:
                for topic in topics:
                    pipeline.xadd(_key(topic), {"": ""}, maxlen=1, approximate=False)
                await pipeline.execute()

        await self._send(send)

    async def wait(self, *topics: Topic, timeout_seconds: float) -> bool:
        """Whether a notification for one of the topics came since this object last waited for it, or ever."""
        deadline = time.monotonic() + timeout_seconds
        while (left := deadline - time.monotonic()) > 0:
            try:
                seconds = min(left, MAX_BLOCK_SECONDS)
                async with answering(seconds + SEND_SECONDS):
                    if await self._read(topics, seconds):
                        return True
            except QueueUnavailable:
                await asyncio.sleep(max(0.0, deadline - time.monotonic()))
        return False

    async def publish_ended(self, attempts: Iterable[AttemptKey] | None) -> None:
        """Tells gateways and collectors which attempts may have ended, None for any. Call it after the commit."""
        ended = None if attempts is None else list(attempts)
        if ended is None or ended:
            await self._send(lambda: self._redis.publish(_ENDED, json.dumps(ended)))

    async def ended(self) -> AsyncIterator[list[AttemptKey] | None]:
        """Yields what `publish_ended` sends, for ever; None, for any, where one was missed or cannot be read."""
        while True:
            try:
                async with self._redis.pubsub() as channel:
                    async with answering(CONNECT_SECONDS + SEND_SECONDS):
                        await channel.subscribe(_ENDED)
                    while True:
                        async with answering(MAX_BLOCK_SECONDS + CONNECT_SECONDS):
                            message = await channel.get_message(timeout=MAX_BLOCK_SECONDS)
                        if message is not None:
                            # After a lost connection the client subscribes again by itself, and reports only that.
                            yield _attempts(message["data"]) if message["type"] == "message" else None
            except (QueueUnavailable, RedisError):
                await asyncio.sleep(RECONNECT_SECONDS)

    async def close(self) -> None:
        await self._redis.aclose()

    async def _send(self, send: Callable[[], Awaitable[object]]) -> None:
        if time.monotonic() < self._away_until:
            return
        try:
            async with answering(SEND_SECONDS):
                await send()
        except QueueUnavailable:
            # Only a hint: whoever waits polls within seconds.
            self._away_until = time.monotonic() + AWAY_SECONDS

    async def _read(self, topics: tuple[Topic, ...], seconds: float) -> bool:
        positions: dict[Any, Any] = {_key(topic): self._positions.get(_key(topic), "0") for topic in topics}
        found: Any = await self._redis.xread(positions, block=max(1, int(seconds * 1000)))
        for key, messages in found.items() if isinstance(found, dict) else found or ():
            self._positions[key] = messages[-1][0]
        return bool(found)


def _attempts(message: str) -> list[AttemptKey] | None:
    """None for a message that is not ours: nothing that others publish ends the subscription."""
    try:
        return _ENDED_ATTEMPTS.validate_json(message, strict=True)
    except ValidationError:
        limited_log.warning("notification not readable", channel=_ENDED)
        return None


def _key(topic: Topic) -> str:
    # Braces keep all topics on one node of a Redis cluster, where one command can wait for several.
    return f"{{leyden:notify}}:{topic}"
