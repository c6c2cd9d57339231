"""Waiting for a condition, so that no test waits for a clock."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from sqlalchemy import text

from leyden.libs.store.database import Database

Found = TypeVar("Found")


def until(ask: Callable[[], Found | None], words: str = "a condition", seconds: float = 300.0) -> Found:
    """The first answer that is true.

    Raises: AssertionError: none came in time
    """
    deadline = time.monotonic() + seconds
    while True:
        asked = time.monotonic()
        if found := ask():
            return found
        now = time.monotonic()
        assert now < deadline, f"not within {seconds:g} s: {words}"
        # A slow question, such as one of kubectl, is asked half of the time at most.
        time.sleep(max(0.05, now - asked))


async def eventually(
    ask: Callable[[], Found | Awaitable[Found | None] | None], words: str = "a condition", seconds: float = 120.0
) -> Found:
    """The same in an event loop.

    Raises: AssertionError: none came in time
    """
    deadline = time.monotonic() + seconds
    while True:
        answer = ask()
        found = await answer if inspect.isawaitable(answer) else answer
        if found:
            return found  # type: ignore[no-any-return]  # isawaitable narrows to Any
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {words}"
        await asyncio.sleep(0.01)


async def waits_for_a_table(database: Database) -> bool:
    """Whether a transaction waits for a table that another one has locked: a test holds a process inside its own so."""
    return bool(await waiting_transactions(database))


async def waiting_transactions(database: Database) -> int:
    """The transactions that wait for a table that another one has locked."""
    async with database.read() as session:
        waiting = "locktype = 'relation' AND NOT granted"
        return await session.scalar(text(f"SELECT count(*) FROM pg_locks WHERE {waiting}")) or 0
