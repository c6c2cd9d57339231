"""Brings every engine to the target version, and brings back an engine that restarted with other weights.

A version changes in three calls: pause (requests in flight return to the engine's queue, new ones wait), load and
continue. Agents never see it: the gateway waits. `/model_info` alone says which version an engine serves.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import httpx
from prometheus_client import Counter, Gauge, Histogram

from leyden.libs.contracts.config import DEFAULT_POOL
from leyden.libs.contracts.ids import parse_weight_version
from leyden.libs.contracts.states import EngineState
from leyden.libs.faults import fault_point
from leyden.libs.queue.notifications import Notifications, Topic
from leyden.libs.service import pause
from leyden.libs.store.database import Database, StoreAway
from leyden.libs.store.engines import EngineStatus, forget_other_engines, write_engines
from leyden.libs.telemetry import SECONDS_BUCKETS, RateLimitedLogger, logger
from leyden.services.controller.engine_client import EngineClient, EngineRefused, TargetVersion
from leyden.services.controller.engine_discovery import EngineDiscovery, FoundEngines
from leyden.services.controller.settings import Settings
from leyden.services.controller.weights import WeightCheck, WeightsLost

log = logger()
limited_log = RateLimitedLogger(log)

UPDATES = Counter("controller_engine_updates_total", "Weight updates of engines.", ["result"])
UPDATE_SECONDS = Histogram("controller_engine_update_seconds", "Pause to continue.", buckets=SECONDS_BUCKETS)
SERVING = Gauge("controller_engines_serving", "Engines that serve the target version.", ["pool"])


@dataclass(eq=False)
class FleetMember:
    """One engine: its status at the last poll, and the target that it last refused, with the time to offer it again."""

    client: EngineClient
    target_changed: asyncio.Event = field(default_factory=asyncio.Event)
    status: EngineStatus | None = None
    resumed: bool = False
    refused: TargetVersion | None = None
    retry_at: float = 0.0


@dataclass
class Fleet:
    """Every engine that discovery lists for one pool."""

    settings: Settings
    discovery: EngineDiscovery
    database: Database
    notifications: Notifications
    pool: str = DEFAULT_POOL

    def __post_init__(self) -> None:
        self._target: TargetVersion | None = None
        self._members: dict[str, FleetMember] = {}
        self._found: FoundEngines | None = None
        self._weights = WeightCheck()

    def set_target(self, target: TargetVersion) -> None:
        """Changes the version that engines should serve."""
        if target != self._target:
            self._target = target
            for member in self._members.values():
                member.target_changed.set()

    def has_target(self, run_id: str, version: int) -> bool:
        """Whether engines are being brought to this version already."""
        return self._target is not None and (self._target.run_id, self._target.version) == (run_id, version)

    def lost_version(self, run_id: str) -> int | None:
        """Returns the target version if it is of this run and its files are damaged or gone."""
        lost = self._weights.lost
        return lost.version if lost is not None and lost == self._target and lost.run_id == run_id else None

    def served_version(self, run_id: str) -> int | None:
        """Returns the oldest version of the run that an engine serves; None when no engine serves the run."""
        versions = [
            status.policy_version
            for status in self._statuses()
            if status.state is EngineState.SERVING and status.run_id == run_id and status.policy_version is not None
        ]
        return min(versions, default=None)

    def trouble(self) -> str | None:
        """Says, for users, why no engine serves or will soon; None when one does."""
        if self._found is not None and not self._found.urls:
            return f"pool {self.pool} has no engine"
        if any(status.state is not EngineState.UNREACHABLE for status in self._statuses()):
            return None
        return "; ".join(f"{status.url}: {status.detail}" for status in self._statuses() if status.detail) or None

    async def run(self) -> None:
        """Follows discovery for ever. Each engine has a task of its own, so that one that hangs delays no other."""
        timeout = httpx.Timeout(self.settings.engine_answer_seconds)
        tasks: dict[str, asyncio.Task[None]] = {}
        async with httpx.AsyncClient(timeout=timeout, trust_env=False) as http, asyncio.TaskGroup() as group:
            while True:
                try:
                    found = await self.discovery.find()
                    for url in found.urls - tasks.keys():
                        member = self.add(EngineClient(url, http, self.settings))
                        tasks[url] = group.create_task(self._follow(member), name=f"engine {url}")
                    for url in tasks.keys() - found.urls:
                        tasks[url].cancel()
                        await asyncio.wait({tasks.pop(url)})
                        del self._members[url]
                    await self._store_found(found)
                except (StoreAway, OSError) as error:
                    limited_log.warning("engines not listed", cause=str(error))
                await asyncio.sleep(self.settings.engine_poll_seconds)

    def add(self, client: EngineClient) -> FleetMember:
        """Makes an engine a member; whoever adds it reconciles it."""
        self._members[client.url] = FleetMember(client)
        return self._members[client.url]

    def _statuses(self) -> list[EngineStatus]:
        return [member.status for member in self._members.values() if member.status is not None]

    async def _store_found(self, found: FoundEngines) -> None:
        """Stores which engines drain, and removes the rows of those that are gone: no gateway sends them new requests.

        Requests in flight go on until the engine ends; the gateway then continues them on another one.
        """
        if found == self._found:
            return
        draining = [EngineStatus(url, EngineState.DRAINING, detail="it ends") for url in sorted(found.draining)]
        async with self.database.session() as session:
            await forget_other_engines(session, sorted(found.urls | found.draining), self.pool)
            await write_engines(session, draining, self.pool)
        self._found = found
        SERVING.labels(self.pool).set(sum(self._serves_target(one) for one in self._statuses()))
        await self.notifications.notify(Topic.ENGINES)

    async def _follow(self, member: FleetMember) -> None:
        while True:
            member.target_changed.clear()
            try:
                await self._reconcile(member)
            except StoreAway as error:
                limited_log.warning("engines not stored", cause=str(error))
            # The loop must live: the next poll tries again.
            except Exception:
                log.exception("engine not reconciled", url=member.client.url)
            await pause(member.target_changed, self.settings.engine_poll_seconds)

    async def _reconcile(self, member: FleetMember) -> None:
        """Polls an engine, updates it where it serves another version than the target, and stores its status."""
        target, client = self._target, member.client
        if target == member.refused and time.monotonic() < member.retry_at:
            return
        try:
            await self._resume_once(member)
            status = await _poll(client)
            if target is not None and (status.run_id, status.policy_version) != (target.run_id, target.version):
                fault_point("controller.version_noticed")
                await self._weights.check(target)
                updating = EngineStatus(client.url, EngineState.UPDATING, detail=f"loading {target.version}")
                await self._store(member, updating)
                status = await _update(client, target)
        # AttributeError: the HTTP client's answer to a connection that is reset while it opens.
        except (httpx.HTTPError, ValueError, AttributeError) as error:
            member.resumed = False
            detail = f"{type(error).__name__}: {error}"[:500]
            status = EngineStatus(client.url, EngineState.UNREACHABLE, detail=detail)
        except (WeightsLost, OSError) as error:
            status = EngineStatus(client.url, EngineState.UNREACHABLE, detail=str(error)[:500])
        except EngineRefused as error:
            UPDATES.labels("refused").inc()
            if target is not None:
                member.refused = target
                member.retry_at = time.monotonic() + self.settings.engine_refusal_seconds
            status = EngineStatus(client.url, EngineState.UNREACHABLE, detail=str(error))
        await self._store(member, status)

    async def _resume_once(self, member: FleetMember) -> None:
        """At the first poll: a controller that was killed between pause and continue left the engine paused."""
        if not member.resumed:
            await member.client.resume()
            member.resumed = True

    async def _store(self, member: FleetMember, status: EngineStatus) -> None:
        """Stores a status that differs from the last one."""
        if member.status == status:
            return
        async with self.database.session() as session:
            await write_engines(session, [status], self.pool)
        member.status = status
        log.info("engine seen", url=status.url, state=status.state, version=status.policy_version, detail=status.detail)
        SERVING.labels(self.pool).set(sum(self._serves_target(one) for one in self._statuses()))
        await self.notifications.notify(Topic.ENGINES)

    def _serves_target(self, status: EngineStatus) -> bool:
        return status.state is EngineState.SERVING and self.has_target(status.run_id or "", status.policy_version or 0)


async def _poll(client: EngineClient) -> EngineStatus:
    label = await client.weight_version()
    try:
        run_id, version = parse_weight_version(label)
    except ValueError:
        return EngineStatus(client.url, EngineState.UPDATING, detail=f"serves {label!r}, which no run gave it")
    return EngineStatus(client.url, EngineState.SERVING, run_id, version)


async def _update(client: EngineClient, target: TargetVersion) -> EngineStatus:
    with UPDATE_SECONDS.time():
        await client.update(target)
    UPDATES.labels("done").inc()
    return await _poll(client)
