"""Readiness: named checks, run together, each bounded in time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

Check = Callable[[], Awaitable[object]]

CHECK_SECONDS = 3.0


class Checks:
    """What a process needs in order to work; a check passes when it returns and fails when it raises.

    While `starting` is true the process is not ready, whatever its checks would say.
    """

    def __init__(self) -> None:
        self.starting = False
        self._checks: dict[str, Check] = {}

    def add(self, name: str, check: Check) -> None:
        """Adds a check, or replaces the one of that name."""
        self._checks[name] = check

    async def run(self) -> dict[str, str]:
        """`ok` or the cause of failure per check, in the order they were added."""
        if self.starting:
            return {"start": "not finished"}
        results = await asyncio.gather(*map(_outcome, self._checks.values()))
        return dict(zip(self._checks, results, strict=True))


async def _outcome(check: Check) -> str:
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            await check()
    except TimeoutError:
        return f"no answer within {CHECK_SECONDS:g} s"
    # Whatever a dependency raises is the finding.
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return "ok"
