"""Runs a worker: a loop, beside the internal HTTP port for health and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from leyden.libs.service.health import Checks
from leyden.libs.service.server import run_until_signal, serving_internal
from leyden.libs.service.settings import ServiceSettings
from leyden.libs.telemetry import logger

Loop = Callable[[asyncio.Event, Checks], Awaitable[None]]
"""Adds its checks to `Checks`, works until the event is set, then finishes its work in progress and returns."""

log = logger()


def run_worker(name: str, settings: ServiceSettings, loop: Loop) -> None:
    """Runs a worker's loop until SIGTERM or SIGINT.

    After the signal the loop has `shutdown_seconds` to finish; then, or at a second signal, this cancels it. An
    exception of the loop ends the process with a traceback: the supervisor starts another one.
    """

    async def main(stop: asyncio.Event) -> None:
        checks = Checks()
        async with serving_internal(settings, checks) as port:
            log.info(f"{name} started", internal_port=port)
            await _bounded(loop(stop, checks), stop, settings.shutdown_seconds)
            log.info(f"{name} stopped")

    run_until_signal(main)


async def pause(event: asyncio.Event, seconds: float) -> bool:
    """Waits for the event, or this long; returns whether the event is set."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def _bounded(work: Awaitable[None], stop: asyncio.Event, seconds: float) -> None:
    """Awaits the loop; cancels it this long after the event is set."""
    loop = asyncio.get_running_loop()

    async def set_deadline() -> None:
        await stop.wait()
        deadline.reschedule(loop.time() + seconds)

    try:
        async with asyncio.timeout(None) as deadline:
            stopping = asyncio.create_task(set_deadline())
            await work
    except TimeoutError:
        if not deadline.expired():
            raise
        log.warning("loop cancelled", seconds=seconds)
    finally:
        stopping.cancel()
