"""The engines and the run that each one serves, refreshed in the background from the controller's table.

A rollout keeps its engine while the set of engines stays the same (rendezvous hashing), so that the engine's prefix
cache serves the rollout's later turns. A call waits here, not at the agent, while no engine serves its run.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from leyden.libs.contracts.config import DEFAULT_POOL
from leyden.libs.contracts.ids import weight_version
from leyden.libs.service import pause
from leyden.libs.store.database import StoreAway
from leyden.libs.telemetry import RateLimitedLogger, logger
from leyden.services.gateway.errors import Unavailable
from leyden.services.gateway.metrics import HELD

UNHEALTHY_SECONDS = 1.0
"""How long a run prefers other engines after an engine failed one of its requests."""
IDLE_FACTOR = 10
"""The pool waits this many times longer between reads of the table while no calls arrive."""
IDLE_AFTER_SECONDS = 10.0

limited_log = RateLimitedLogger(logger())


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An engine and the policy version that it serves; `run_id` is None for an engine that no controller manages.

    `is_shared`: the engine serves several runs, and reports the version of its base model alone. `adapter`: the name of
    the run's LoRA adapter on it; None for the engine's own weights.
    """

    url: str
    run_id: str | None = None
    policy_version: int | None = None
    pool: str = DEFAULT_POOL
    is_shared: bool = False
    adapter: str | None = None

    @property
    def weight_version(self) -> str | None:
        """`run:version`, as the engine reports it; None for an unmanaged engine."""
        if self.run_id is None or self.policy_version is None:
            return None
        return weight_version(self.run_id, self.policy_version)


ReadEndpoints = Callable[[], Awaitable[Sequence[Endpoint]]]


class HoldTimeout:
    """How long a call may still wait for an engine; `renew` restarts the time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lost = ""
        self.renew()

    def renew(self) -> None:
        """Restarts the time; called when the call gets tokens."""
        self._silences = 0
        self._deadline = asyncio.get_running_loop().time() + self._seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time within the block does not count: an engine has accepted the request.

        It counts from the second time on that the engine falls silent: engines that hang may be all that there are.
        """
        clock = asyncio.get_running_loop().time
        began, counts = clock(), False
        try:
            yield
        except TimeoutError:
            self._silences += 1
            counts = self._silences > 1
            raise
        finally:
            if not counts:
                self._deadline += clock() - began

    def lose(self, url: str, cause: str) -> None:
        """Notes why the last engine lost the request, for the record of a call that fails."""
        self._lost = f" The last one, {url}, lost the request: {cause[:200]}"

    def remaining(self) -> float:
        """Seconds until the timeout, always above 0.

        Raises: Unavailable: the time is over
        """
        seconds = self._deadline - asyncio.get_running_loop().time()
        if seconds <= 0:
            error = Unavailable(
                f"No engine served this run for {self._seconds:g} seconds; try again.",
                code="engine_unavailable",
                retry_after_seconds=10,
            )
            error.detail = self._lost
            raise error
        return seconds


class EnginePool:
    """The engines that can answer calls.

    Args: read: reads the serving engines from the controller's table; static_urls: used while that table is empty
    """

    def __init__(self, read: ReadEndpoints, *, static_urls: Sequence[str], poll_seconds: float) -> None:
        self._read = read
        self._static = [Endpoint(url.rstrip("/")) for url in static_urls]
        self._poll_seconds = poll_seconds
        self._endpoints = list(self._static)
        # By run: of engines that only the settings name, each serves one run and fails all others.
        self._unhealthy_until: dict[tuple[str, str], float] = {}
        self._refreshed = asyncio.Event()
        self._requested = asyncio.Event()
        self._last_pick = 0.0

    async def run(self) -> None:
        """Refreshes the pool until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(self._poll_seconds)
            if asyncio.get_running_loop().time() - self._last_pick > IDLE_AFTER_SECONDS:
                await pause(self._requested, (IDLE_FACTOR - 1) * self._poll_seconds)
            self._requested.clear()

    async def refresh(self) -> None:
        """Reads the table once. While the store is unreachable, the engines of the last read stay in the pool."""
        try:
            endpoints = list(await self._read())
        except StoreAway as error:
            limited_log.warning("engines not read", cause=str(error))
            return
        self._endpoints = endpoints or list(self._static)
        # Wakes the calls that wait now; a later `pick` waits for the next refresh.
        self._refreshed.set()
        self._refreshed.clear()

    async def pick(
        self, run_id: str, rollout_id: str, hold: HoldTimeout, pool: str = DEFAULT_POOL, version: int | None = None
    ) -> Endpoint:
        """Returns the rollout's engine; waits while no engine of the pool serves the run, or that version of it.

        Raises: Unavailable: no engine served the run before the hold timeout
        """
        self._last_pick = asyncio.get_running_loop().time()
        self._requested.set()
        endpoint = self._choose(run_id, rollout_id, pool, version)
        if endpoint is not None:
            return endpoint
        with HELD.track_inprogress():
            while endpoint is None:
                await pause(self._refreshed, min(hold.remaining(), 2 * self._poll_seconds))
                endpoint = self._choose(run_id, rollout_id, pool, version)
        return endpoint

    def mark_unhealthy(self, url: str, run_id: str) -> None:
        """Prefers other engines for the run, for `UNHEALTHY_SECONDS`."""
        now = asyncio.get_running_loop().time()
        lasting = {key: until for key, until in self._unhealthy_until.items() if until > now}
        self._unhealthy_until = lasting | {(run_id, url): now + UNHEALTHY_SECONDS}
        self._requested.set()

    def _choose(self, run_id: str, rollout_id: str, pool: str, version: int | None) -> Endpoint | None:
        serving = [one for one in self._endpoints if one.pool == pool and one.run_id in {run_id, None}]
        if version is not None:
            serving = [one for one in serving if one.policy_version in {version, None}]
        now = asyncio.get_running_loop().time()
        healthy = [endpoint for endpoint in serving if self._unhealthy_until.get((run_id, endpoint.url), 0.0) < now]
        return max(healthy or serving, key=lambda endpoint: _score(endpoint.url, rollout_id), default=None)


def _score(url: str, rollout_id: str) -> int:
    return zlib.crc32(f"{url} {rollout_id}".encode())
