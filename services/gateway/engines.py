"""Which engine serves a run now: the controller's table, read in the background; requests wait here, not at the agent.

A rollout keeps its engine while the set of engines stays (rendezvous hashing), so that its prefixes stay cached.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from leyden.libs.contracts.ids import weight_version
from leyden.libs.service import pause
from leyden.libs.store.calls import StoreAway
from leyden.libs.telemetry import RateLimitedLogger, logger
from leyden.services.gateway.errors import Unavailable
from leyden.services.gateway.metrics import HELD

SUSPECT_SECONDS = 1.0
QUIET_FACTOR = 10
"""How much slower the table is read when no request has come for a while."""
QUIET_AFTER_SECONDS = 10.0

limited_log = RateLimitedLogger(logger())


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An engine and what it was last seen serving; `run_id` is None for an engine nobody manages."""

    url: str
    run_id: str | None = None
    policy_version: int | None = None

    @property
    def weight_version(self) -> str | None:
        """`run:version`, as the engine reports it."""
        if self.run_id is None or self.policy_version is None:
            return None
        return weight_version(self.run_id, self.policy_version)


ReadEndpoints = Callable[[], Awaitable[Sequence[Endpoint]]]


class Patience:
    """How long a request may still be held; every token it gets renews it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.renew()

    def renew(self) -> None:
        """Begins to count anew."""
        self._deadline = asyncio.get_running_loop().time() + self._seconds

    def left(self) -> float:
        """Seconds that remain.

        Raises: Unavailable: none
        """
        left = self._deadline - asyncio.get_running_loop().time()
        if left <= 0:
            raise Unavailable(
                f"No engine served this run for {self._seconds:g} seconds; try again.",
                code="engine_unavailable",
                retry_after_seconds=10,
            )
        return left


class Directory:
    """The engines and their policies.

    Args: read: the serving engines of the controller's table; static_urls: used while that table names none
    """

    def __init__(self, read: ReadEndpoints, *, static_urls: Sequence[str], poll_seconds: float) -> None:
        self._read = read
        self._static = [Endpoint(url.rstrip("/")) for url in static_urls]
        self._poll_seconds = poll_seconds
        self._endpoints: list[Endpoint] = list(self._static)
        self._suspects: dict[str, float] = {}
        self._refreshed = asyncio.Event()
        self._wanted = asyncio.Event()
        self._last_pick = 0.0

    async def run(self) -> None:
        """Keeps the directory fresh until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(self._poll_seconds)
            if self._is_quiet():
                await pause(self._wanted, (QUIET_FACTOR - 1) * self._poll_seconds)
            self._wanted.clear()

    async def refresh(self) -> None:
        """Reads the table once. A store that is away leaves what was known."""
        try:
            endpoints = list(await self._read())
        except StoreAway as error:
            limited_log.warning("engines not read", cause=str(error))
            return
        self._endpoints = endpoints or list(self._static)
        # Wakes all who wait now.
        self._refreshed.set()
        self._refreshed.clear()

    async def pick(self, run_id: str, rollout_id: str, patience: Patience) -> Endpoint:
        """An engine that serves the run; waits for one.

        Raises: Unavailable: none came in time
        """
        self._last_pick = asyncio.get_running_loop().time()
        self._wanted.set()
        endpoint = self._choose(run_id, rollout_id)
        if endpoint is not None:
            return endpoint
        with HELD.track_inprogress():
            while endpoint is None:
                await pause(self._refreshed, min(patience.left(), 2 * self._poll_seconds))
                endpoint = self._choose(run_id, rollout_id)
        return endpoint

    def suspect(self, url: str) -> None:
        """Prefers other engines for a moment: this one did not answer."""
        self._suspects[url] = asyncio.get_running_loop().time() + SUSPECT_SECONDS
        self._wanted.set()

    def _choose(self, run_id: str, rollout_id: str) -> Endpoint | None:
        serving = [endpoint for endpoint in self._endpoints if endpoint.run_id in {run_id, None}]
        now = asyncio.get_running_loop().time()
        trusted = [endpoint for endpoint in serving if self._suspects.get(endpoint.url, 0.0) < now]
        return max(trusted or serving, key=lambda endpoint: _weight(endpoint.url, rollout_id), default=None)

    def _is_quiet(self) -> bool:
        return asyncio.get_running_loop().time() - self._last_pick > QUIET_AFTER_SECONDS


def _weight(url: str, rollout_id: str) -> int:
    return zlib.crc32(f"{url} {rollout_id}".encode())
