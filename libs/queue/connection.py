"""Connects to Redis and converts all its failures to `QueueUnavailable`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

MAX_BLOCK_SECONDS = 10.0
"""Longest wait inside one command; a longer wait is several commands, so that a dead connection is noticed."""
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 5.0
"""Default time-out of a command beyond its own wait: a Redis that is silent for longer counts as down."""


class QueueUnavailable(ConnectionError):
    """Redis does not answer. Nothing is lost: wait and try again, or set LEYDEN_REDIS_URL to a server that runs."""


def connect(url: str) -> Redis:
    """Returns a client with a time-out for every command; it replaces a broken pooled connection once, silently."""
    return Redis.from_url(
        url,
        decode_responses=True,
        encoding_errors="replace",
        socket_connect_timeout=CONNECT_SECONDS,
        socket_timeout=MAX_BLOCK_SECONDS + 5,
        retry=Retry(NoBackoff(), 1),
    )


@asynccontextmanager
async def answering(seconds: float) -> AsyncIterator[None]:
    """Converts the exceptions of a Redis that is down, silent, loading, full or read-only to `QueueUnavailable`."""
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    try:
        async with asyncio.timeout(seconds):
            yield
    # ValueError: a program other than Redis answers. RuntimeError: uvloop's, for a connection that was just reset.
    except (RedisError, OSError, ValueError, RuntimeError) as error:
        if task.cancelling() == before:
            reason = str(error) or f"nothing within {seconds:g} s"
            raise QueueUnavailable(f"Redis does not answer: {reason}") from error
    if task.cancelling() > before:
        # The client swallows a cancellation that arrives while it connects.
        raise asyncio.CancelledError
