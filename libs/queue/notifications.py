"""Notifications over Redis: hints that rows in Postgres changed, so that processes can poll rarely.

A lost notification costs a poll interval. Each topic is a stream of one entry. A waiter reads after the last entry that
it has read, so it gets notifications sent while it worked, and needs a connection only while it waits.
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
"""Time-out of sending a notification; the caller continues without it."""
AWAY_SECONDS = 5.0
"""Sends nothing for this long after a failed notification, so that a silent Redis does not delay callers."""
_ENDED = "{leyden:notify}:ended"

limited_log = RateLimitedLogger(logger())
_ENDED_ATTEMPTS: TypeAdapter[list[AttemptKey] | None] = TypeAdapter(list[AttemptKey] | None)


class Topic(StrEnum):
    """The kinds of rows that may have changed."""

    OUTCOMES = "outcomes"
    GRADINGS = "gradings"
    GROUPS = "groups"
    SAMPLES = "samples"
    VERSIONS = "versions"
    RUNS = "runs"
    ENGINES = "engines"
    TRANSFERS = "transfers"


class Notifications:
    """Sends and awaits notifications. Nothing raises while Redis is down: sending does nothing, waiting sleeps."""

    def __init__(self, url: str) -> None:
        self._redis: Redis = connect(url)
        self._positions: dict[str, str] = {}
        self._away_until = 0.0

    async def notify(self, *topics: Topic) -> None:
        """Wakes all processes that wait for one of the topics. Call it after the commit."""

        async def send() -> None:
            async with self._redis.pipeline(transaction=False) as pipeline:
                for topic in topics:
                    pipeline.xadd(_key(topic), {"": ""}, maxlen=1, approximate=False)
                await pipeline.execute()

        await self._send(send)

    async def wait(self, *topics: Topic, timeout_seconds: float) -> bool:
        """Waits for a notification of one of the topics since this object's last wait; returns whether one arrived."""
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
        """Notifies gateways and collectors of attempts that may have ended, None for any. Call it after the commit."""
        ended = None if attempts is None else list(attempts)
        if ended is None or ended:
            await self._send(lambda: self._redis.publish(_ENDED, json.dumps(ended)))

    async def ended(self) -> AsyncIterator[list[AttemptKey] | None]:
        """Yields the messages of `publish_ended`, for ever; None (any attempt) where one was lost or is invalid."""
        while True:
            try:
                async with self._redis.pubsub() as channel:
                    async with answering(CONNECT_SECONDS + SEND_SECONDS):
                        await channel.subscribe(_ENDED)
                    while True:
                        async with answering(MAX_BLOCK_SECONDS + CONNECT_SECONDS):
                            message = await channel.get_message(timeout=MAX_BLOCK_SECONDS)
                        if message is not None:
                            # After a lost connection the client resubscribes; a message of another type reports it.
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
            # Only a hint: waiting processes poll within seconds.
            self._away_until = time.monotonic() + AWAY_SECONDS

    async def _read(self, topics: tuple[Topic, ...], seconds: float) -> bool:
        positions: dict[Any, Any] = {_key(topic): self._positions.get(_key(topic), "0") for topic in topics}
        found: Any = await self._redis.xread(positions, block=max(1, int(seconds * 1000)))
        for key, messages in found.items() if isinstance(found, dict) else found or ():
            self._positions[key] = messages[-1][0]
        return bool(found)


def _attempts(message: str) -> list[AttemptKey] | None:
    """Parses a message; None for an invalid one, which must not end the subscription."""
    try:
        return _ENDED_ATTEMPTS.validate_json(message, strict=True)
    except ValidationError:
        limited_log.warning("notification not readable", channel=_ENDED)
        return None


def _key(topic: Topic) -> str:
    # Braces keep all topics on one node of a Redis cluster, where one command can wait for several.
    return f"{{leyden:notify}}:{topic}"
