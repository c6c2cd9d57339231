"""The loop of work beside the ticks: one round after another, where a failed one stops no later one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from leyden.libs.store.database import StoreAway
from leyden.libs.telemetry import RateLimitedLogger, logger

log = logger()
limited_log = RateLimitedLogger(log)


async def repeat(work: Callable[[], Awaitable[object]], pause_seconds: float, failure: str) -> None:
    """Awaits `work` again and again, with a pause after each round, until cancelled.

    Args: failure: what the log says of a round that failed, such as "runs not pruned"
    """
    while True:
        try:
            await work()
        except StoreAway as error:
            limited_log.warning(failure, cause=str(error))
        # The loop must live: the next round tries again.
        except Exception:
            log.exception(failure)
        await asyncio.sleep(pause_seconds)
