"""The leader's loop: one tick after another, and the tasks beside them.

- The process leads as long as its lock holds: every tick asks first.
- A tick that fails is repeated; a task beside the ticks that ends takes the leader down with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable

from prometheus_client import Counter, Histogram

from leyden.libs.service import pause
from leyden.libs.store.database import StoreAway
from leyden.libs.store.locks import AdvisoryLock
from leyden.libs.telemetry import SECONDS_BUCKETS, RateLimitedLogger, logger

log = logger()
limited_log = RateLimitedLogger(log)

TICK_SECONDS = Histogram("controller_tick_seconds", "Duration of one tick.", buckets=SECONDS_BUCKETS)
TICK_FAILURES = Counter("controller_tick_failures_total", "Ticks that raised.")

SHORTEST_PAUSE_SECONDS = 0.1


async def lead(
    tick: Callable[[], Awaitable[None]],
    notified: Callable[[], Coroutine[None, None, object]],
    beside: Iterable[Coroutine[None, None, None]],
    lock: AdvisoryLock,
    stop: asyncio.Event,
) -> None:
    """Ticks until asked to stop.

    Args:   notified: returns when the next tick is due; beside: run meanwhile, and have ended when this returns
    Raises: LockLost: another controller may lead
    """
    background = [asyncio.create_task(one) for one in beside]
    try:
        while not stop.is_set():
            await lock.check()
            try:
                with TICK_SECONDS.time():
                    await tick()
            except StoreAway as error:
                TICK_FAILURES.inc()
                limited_log.warning("store away", cause=str(error))
            # The loop must live: the next tick sees the same rows.
            except Exception:
                TICK_FAILURES.inc()
                log.exception("tick failed")
            for task in background:
                if task.done():
                    task.result()
            await _until_next_tick(notified, stop)
    finally:
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)


async def _until_next_tick(notified: Callable[[], Coroutine[None, None, object]], stop: asyncio.Event) -> None:
    # Outcomes come in bursts, and one tick settles them all.
    if await pause(stop, SHORTEST_PAUSE_SECONDS):
        return
    tasks = [asyncio.create_task(stop.wait()), asyncio.create_task(notified())]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
