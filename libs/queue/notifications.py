"""Notifications-ups: hints that something changed in Postgres, or soon will, so that nobody has to poll often.

Losing one costs a poll interval, or what could have been done ahead of the change. Each topic is a stream of one entry,
read from where this waiter stopped: a hint given while it worked is not missed, and no connection is held while nobody
waits. What is announced has content, and reaches only those who listen.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from enum import StrEnum
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from redis.asyncio import Redis
from redis.exceptions import RedisError

from leyden.libs.queue.connection import CONNECT_SECONDS, MAX_BLOCK_SECONDS, QueueUnavailable, answering, connect
from leyden.libs.store.attempts import AttemptKey
from leyden.libs.telemetry import RateLimitedLogger, logger

RECONNECT_SECONDS = 1.0
HINT_SECONDS = 1.0
"""What a hint may cost: work goes on without it."""
AWAY_SECONDS = 5.0
"""How long no hint is given after one that Redis did not take, so that a silent Redis slows nobody down."""
_ENDS = "{leyden:wake}:ends"

T = TypeVar("T")
limited_log = RateLimitedLogger(logger())


_ENDED: TypeAdapter[list[AttemptKey] | None] = TypeAdapter(list[AttemptKey] | None)


class Topic(StrEnum):
    """What may have changed."""

    ROLLOUTS = "rollouts"
    OUTCOMES = "outcomes"
    GROUPS = "groups"
    SAMPLES = "samples"
    VERSIONS = "versions"
    RUNS = "runs"
    ENGINES = "engines"


class Notifications:
    """Gives and awaits hints. Nothing here raises when Redis is away: giving does nothing, and waiting is sleeping."""

    def __init__(self, url: str) -> None:
        self._redis: Redis = connect(url)
        self._seen: dict[str, str] = {}
        self._away_until = 0.0

    async def notify(self, *topics: Topic) -> None:
        """Wakes everybody who waits for one of the topics; to be called after the change is committed."""

        async def give() -> None:
            async with self._redis.pipeline(transaction=False) as pipeline:
                for topic in topics:
                    pipeline.xadd(_key(topic), {"": ""}, maxlen=1, approximate=False)
                await pipeline.execute()

        await self._give(give)

    async def wait(self, *topics: Topic, timeout_seconds: float) -> bool:
        """Whether one of the topics was given since this object's last `wait` for it; the first one looks back too."""
        deadline = time.monotonic() + timeout_seconds
        while (left := deadline - time.monotonic()) > 0:
            try:
                seconds = min(left, MAX_BLOCK_SECONDS)
                async with answering(seconds + HINT_SECONDS):
                    if await self._read(topics, seconds):
                        return True
            except QueueUnavailable:
                await asyncio.sleep(max(0.0, deadline - time.monotonic()))
        return False

    async def publish_ended(self, attempts: Iterable[AttemptKey] | None) -> None:
        """Tells every door which attempts may have ended, None for any; to be called after the end is committed."""
        ended = None if attempts is None else list(attempts)
        if ended is None or ended:
            await self._give(lambda: self._redis.publish(_ENDS, json.dumps(ended)))

    async def ends(self) -> AsyncIterator[list[AttemptKey] | None]:
        """What is announced from now on, for ever; None where any may have ended, as one was missed or is odd."""
        async for heard in self._hear(_ENDS):
            yield None if heard is None else _read(_ENDED, heard, _ENDS)

    async def _hear(self, name: str) -> AsyncIterator[str | None]:
        """What is published under a name from now on, for ever; None where something may have been missed."""
        while True:
            try:
                async with self._redis.pubsub() as channel:
                    async with answering(CONNECT_SECONDS + HINT_SECONDS):
                        await channel.subscribe(name)
                    while True:
                        async with answering(MAX_BLOCK_SECONDS + CONNECT_SECONDS):
                            message = await channel.get_message(timeout=MAX_BLOCK_SECONDS)
                        if message is not None:
                            # The client subscribes again by itself after a lost connection, and says only so.
                            yield message["data"] if message["type"] == "message" else None
            except (QueueUnavailable, RedisError):
                await asyncio.sleep(RECONNECT_SECONDS)

    async def close(self) -> None:
        """Closes every connection."""
        await self._redis.aclose()

    async def _give(self, give: Callable[[], Awaitable[object]]) -> None:
        if time.monotonic() < self._away_until:
            return
        try:
            async with answering(HINT_SECONDS):
                await give()
        except QueueUnavailable:
            # Only a hint: whoever waits looks for himself within seconds.
            self._away_until = time.monotonic() + AWAY_SECONDS

    async def _read(self, topics: tuple[Topic, ...], seconds: float) -> bool:
        positions: dict[Any, Any] = {_key(topic): self._seen.get(_key(topic), "0") for topic in topics}
        found: Any = await self._redis.xread(positions, block=max(1, int(seconds * 1000)))
        for key, messages in found.items() if isinstance(found, dict) else found or ():
            self._seen[key] = messages[-1][0]
        return bool(found)


def _read(kind: TypeAdapter[T], heard: str, name: str) -> T | None:
    """None where it is not of this kind: what others publish under a name ends nobody who listens."""
    try:
        return kind.validate_json(heard, strict=True)
    except ValidationError:
        limited_log.warning("announcement not readable", name=name)
        return None


def _key(topic: Topic) -> str:
    # Braces keep all topics on one node of a Redis cluster, where one command can wait for several.
    return f"{{leyden:wake}}:{topic}"
