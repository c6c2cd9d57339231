"""Redis as one named exception: reachable, or `QueueUnavailable`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

MAX_BLOCK_SECONDS = 10.0
"""Longest wait inside one command; a longer wait is several commands, so that a dead connection is noticed."""


class QueueUnavailable(ConnectionError):
    """Redis does not answer. Nothing is lost: wait and try again, or set LEYDEN_REDIS_URL to a server that runs."""


def connect(url: str) -> Redis:
    """A client whose every command is bounded in time; a pooled connection that died is replaced once, silently."""
    return Redis.from_url(
        url,
        decode_responses=True,
        socket_connect_timeout=5,
        socket_timeout=MAX_BLOCK_SECONDS + 5,
        retry=Retry(NoBackoff(), 1),
    )


@contextmanager
def answering() -> Iterator[None]:
    """Turns what a Redis that is away, loading or full raises into `QueueUnavailable`."""
    try:
        yield
    except (RedisError, OSError) as error:
        raise QueueUnavailable(f"Redis does not answer: {error}") from error
