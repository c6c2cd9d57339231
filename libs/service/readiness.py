"""Telling a supervisor, over a pipe, that this process can work: over a shared socket another might answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os

from leyden.libs.service.health import Checks

LOOK_SECONDS = 0.1
"""Between two looks of a process that is not ready yet."""


async def tell_readiness(descriptor: int | None, checks: Checks) -> None:
    """Writes what the checks say as a line of JSON whenever it changes, and returns once all are `ok`.

    Args: descriptor: the writing end of a pipe, closed at the end; nobody is told when null
    """
    if descriptor is None:
        return
    os.set_inheritable(descriptor, False)
    told: dict[str, str] | None = None
    with os.fdopen(descriptor, "w", encoding="utf-8") as pipe:
        while told is None or any(result != "ok" for result in told.values()):
            if told is not None:
                await asyncio.sleep(LOOK_SECONDS)
            results = await checks.run()
            if results != told:
                told = results
                # A supervisor that is gone has no use for it, and this process dies with it anyway.
                with contextlib.suppress(BrokenPipeError):
                    pipe.write(json.dumps(told) + "\n")
                    pipe.flush()
