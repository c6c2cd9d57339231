"""Every engine of a pool, each followed by a task of its own, and brought to the target versions of its runs.

Engines of a pool with `adapters` get LoRA adapters (`adapters.py`); the runs of other pools take turns (`turns.py`). An
engine that restarted with other weights is brought back the same way. Engines that embed get none (`embedders.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Protocol

import httpx

from leyden.libs.contracts.states import EngineState
from leyden.libs.queue.notifications import Topic
from leyden.libs.service import pause
from leyden.libs.store.database import StoreAway
from leyden.libs.store.engines import EngineStatus, forget_other_engines, write_engines
from leyden.libs.telemetry import RateLimitedLogger, logger
from leyden.services.controller.engines.client import EngineClient
from leyden.services.controller.engines.discovery import EngineDiscovery, FoundEngines
from leyden.services.controller.engines.members import SERVING, UNSERVED, FleetMember, Members, served_by
from leyden.services.controller.engines.targets import TargetVersion

log = logger()
limited_log = RateLimitedLogger(log)


class Delivery(Protocol):
    """A way to bring engines to the versions that their runs should have."""

    def set_target(self, target: TargetVersion) -> None:
        """Changes the version of the target's run that engines should serve."""

    def retain_targets(self, run_ids: Collection[str]) -> None:
        """Forgets the targets of other runs, where engines serve several."""

    async def reconcile(self, member: FleetMember) -> None:
        """Polls an engine, brings it to its targets and stores its status.

        Raises: httpx.HTTPError, ValueError: it does not answer as an engine
        """


class Fleet:
    """Every engine that discovery lists for one pool.

    Args: adapters: so many runs share the engines; None: one run has them
    """

    def __init__(
        self, discovery: EngineDiscovery, members: Members, delivery: Delivery, adapters: int | None = None
    ) -> None:
        self.adapters = adapters
        self._discovery, self._members, self._delivery = discovery, members, delivery
        self._found: FoundEngines | None = None

    def set_target(self, target: TargetVersion) -> None:
        """Changes the version of the target's run that engines should serve."""
        if target != self._members.targets.get(target.run_id):
            self._delivery.set_target(target)
            self._members.measure()

    def retain_targets(self, run_ids: Collection[str]) -> None:
        """Forgets the targets of runs that have the engines no longer, where engines serve several."""
        self._members.at_work = frozenset(run_ids)
        self._delivery.retain_targets(run_ids)
        self._members.measure()

    def has_target(self, run_id: str, version: int) -> bool:
        """Whether engines are being brought to this version already."""
        target = self._members.targets.get(run_id)
        return target is not None and target.version == version

    def lost_version(self, run_id: str) -> int | None:
        """Returns the target version if it is of this run and its files are damaged or gone."""
        lost = self._members.weights.lost.get(run_id)
        return lost.version if lost is not None and lost == self._members.targets.get(run_id) else None

    def served_version(self, run_id: str) -> int | None:
        """Returns the oldest version of the run that an engine serves.

        None when no engine serves the run, or one has yet to leave a version after the target, as before an
        evaluation of an older version.
        """
        versions = [
            version for status in self._members.serving() for run, version in served_by(status) if run == run_id
        ]
        target = self._members.targets.get(run_id)
        if target is not None and max(versions, default=0) > target.version:
            return None
        return min(versions, default=None)

    def trouble(self, run_id: str) -> str | None:
        """Says, for users, why no engine serves the run's target or will soon; None when one does."""
        if self._found is not None and not self._found.urls:
            return f"pool {self._members.pool} has no engine"
        target, patience = self._members.targets.get(run_id), self._members.settings.engine_answer_seconds
        found = {url: member.trouble(run_id, target, patience) for url, member in self._members.by_url.items()}
        return None if None in found.values() else "; ".join(f"{url}: {why}" for url, why in found.items()) or None

    async def run(self) -> None:
        """Follows discovery for ever. Each engine has a task of its own, so that one that hangs delays no other."""
        timeout = httpx.Timeout(self._members.settings.engine_answer_seconds)
        tasks: dict[str, asyncio.Task[None]] = {}
        try:
            async with httpx.AsyncClient(timeout=timeout, trust_env=False) as http, asyncio.TaskGroup() as group:
                while True:
                    try:
                        found = await self._discovery.find()
                        for url in found.urls - tasks.keys():
                            member = self.add(EngineClient(url, http, self._members.settings))
                            tasks[url] = group.create_task(self._follow(member), name=f"engine {url}")
                        for url in tasks.keys() - found.urls:
                            tasks[url].cancel()
                            await asyncio.wait({tasks.pop(url)})
                            del self._members.by_url[url]
                        await self._store_found(found)
                    except (StoreAway, OSError) as error:
                        limited_log.warning("engines not listed", cause=str(error))
                    await asyncio.sleep(self._members.settings.engine_poll_seconds)
        finally:
            # The controller that leads next measures them.
            SERVING.labels(self._members.pool).set(0)
            UNSERVED.labels(self._members.pool).set(0)

    def add(self, client: EngineClient) -> FleetMember:
        """Makes an engine a member; whoever adds it reconciles it."""
        member = self._members.by_url[client.url] = FleetMember(client)
        return member

    async def reconcile(self, member: FleetMember) -> None:
        """Polls an engine, brings it to its targets and stores its status."""
        try:
            await self._delivery.reconcile(member)
        # AttributeError: the HTTP client's answer to a connection that is reset while it opens.
        except (httpx.HTTPError, ValueError, AttributeError) as error:
            member.went_away()
            detail = f"{type(error).__name__}: {error}"[:500]
            status = EngineStatus(member.client.url, EngineState.UNREACHABLE, detail=detail)
            await self._members.store(member, status)

    async def _store_found(self, found: FoundEngines) -> None:
        """Stores which engines drain, and removes the rows of those that are gone: no gateway sends them new requests.

        Requests in flight go on until the engine ends; the gateway then continues them on another one.
        """
        if found == self._found:
            return
        draining = [EngineStatus(url, EngineState.DRAINING, detail="it ends") for url in sorted(found.draining)]
        async with self._members.database.session() as session:
            await forget_other_engines(session, sorted(found.urls | found.draining), self._members.pool)
            await write_engines(session, draining, self._members.pool)
        self._found = found
        self._members.measure()
        await self._members.notifications.notify(Topic.ENGINES)

    async def _follow(self, member: FleetMember) -> None:
        while True:
            member.target_changed.clear()
            try:
                await self.reconcile(member)
            except StoreAway as error:
                limited_log.warning("engines not stored", cause=str(error))
            # The loop must live: the next poll tries again.
            except Exception:
                log.exception("engine not reconciled", url=member.client.url)
            await pause(member.target_changed, self._members.settings.engine_poll_seconds)
