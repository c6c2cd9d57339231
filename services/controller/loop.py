"""The leader's loop: one tick after another, and the tasks beside them."""

from __future__ import annotations

import asyncio

from prometheus_client import Counter, Histogram

from leyden.libs.queue.notifications import Topic
from leyden.libs.service import pause
from leyden.libs.store.database import StoreAway
from leyden.libs.store.locks import AdvisoryLock
from leyden.libs.telemetry import SECONDS_BUCKETS, RateLimitedLogger, logger
from leyden.services.controller.tick import Controller
from leyden.services.controller.upkeep.deletion import delete_forever
from leyden.services.controller.upkeep.retention import prune_forever

log = logger()
limited_log = RateLimitedLogger(log)

TICK_SECONDS = Histogram("controller_tick_seconds", "Duration of one tick.", buckets=SECONDS_BUCKETS)
TICK_FAILURES = Counter("controller_tick_failures_total", "Ticks that raised.")

SHORTEST_PAUSE_SECONDS = 0.1


async def lead(controller: Controller, lock: AdvisoryLock, stop: asyncio.Event) -> None:
    """Ticks until asked to stop.

    Raises: LockLost: another controller may lead; what must end with this one has ended by then
    """
    await controller.take_over()
    background = [
        *(asyncio.create_task(fleet.run(), name=f"engines of {pool}") for pool, fleet in controller.fleets.items()),
        asyncio.create_task(prune_forever(controller.settings, controller.database), name="retention"),
        asyncio.create_task(delete_forever(controller.settings, controller.database), name="deletion"),
    ]
    try:
        while not stop.is_set():
            await lock.check()
            try:
                with TICK_SECONDS.time():
                    await controller.tick()
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
            await _until_next_tick(controller, stop)
    finally:
        for task in background:
            task.cancel()
        await asyncio.gather(*background, controller.trainers.close(), return_exceptions=True)


async def _until_next_tick(controller: Controller, stop: asyncio.Event) -> None:
    # Outcomes come in bursts, and one tick settles them all.
    if await pause(stop, SHORTEST_PAUSE_SECONDS):
        return
    topics = (Topic.OUTCOMES, Topic.SAMPLES, Topic.VERSIONS, Topic.RUNS, Topic.ENGINES)
    notified = controller.notifications.wait(*topics, timeout_seconds=controller.settings.tick_seconds)
    tasks = [asyncio.create_task(stop.wait()), asyncio.create_task(notified)]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
