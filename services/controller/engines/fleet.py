"""Brings every engine to the target version, and brings back an engine that restarted with other weights.

Engines of a pool with `adapters` serve a base model and the LoRA adapter of each run's target version beside it. A new
version is a new adapter under a new name: nothing pauses, and calls in flight end on the version that they began with.

In other pools one run's weights are the engine's. A version changes in three calls: pause (requests in flight return to
the engine's queue, new ones wait), load and continue. Agents never see it: the gateway waits. `/model_info` alone says
which version an engine serves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import httpx
from prometheus_client import Counter, Gauge, Histogram

from leyden.libs.contracts.config import DEFAULT_POOL
from leyden.libs.contracts.ids import parse_weight_version, weight_version
from leyden.libs.contracts.states import EngineState
from leyden.libs.contracts.weights import ADAPTER_FOLDER
from leyden.libs.faults import fault_point
from leyden.libs.queue.notifications import Notifications, Topic
from leyden.libs.service import pause
from leyden.libs.store.database import Database, StoreAway
from leyden.libs.store.engines import Adapter, EngineStatus, forget_other_engines, serving_engines, write_engines
from leyden.libs.telemetry import SECONDS_BUCKETS, RateLimitedLogger, logger
from leyden.services.controller.engines.client import EngineClient, EngineRefused, IncomingWeights, TargetVersion
from leyden.services.controller.engines.discovery import EngineDiscovery, FoundEngines
from leyden.services.controller.engines.files import WeightCheck, WeightsLost
from leyden.services.controller.engines.network import requested_transfer
from leyden.services.controller.engines.offers import Offer, since, utc_now
from leyden.services.controller.settings import Settings

log = logger()
limited_log = RateLimitedLogger(log)

UPDATES = Counter("controller_engine_updates_total", "Weight updates of engines.", ["result"])
UPDATE_SECONDS = Histogram("controller_engine_update_seconds", "Pause to continue.", buckets=SECONDS_BUCKETS)
SERVING = Gauge("controller_engines_serving", "Engines that serve the target version of every run.", ["pool"])
UNSERVED = Gauge(
    "controller_runs_unserved", "Runs with a target version that no engine serves any version of.", ["pool"]
)

_PARTLY_LOADED = "incomplete unload"
"""SGLang's words once a load or an unload failed on some of its ranks: it wants the adapter unloaded first."""


@dataclass(eq=False)
class FleetMember:
    """One engine: its status at the last poll, and by run the version that it was offered and does not serve."""

    client: EngineClient
    target_changed: asyncio.Event = field(default_factory=asyncio.Event)
    status: EngineStatus | None = None
    resumed: bool = False
    recent: dict[str, tuple[str | None, ...]] | None = None
    """By run the adapter that it was last served with, and the one before; None before the first poll."""
    freeing: dict[str, float] = field(default_factory=dict)
    """Adapters that the engine has not freed in time, and when to ask again."""
    offers: dict[str, Offer] = field(default_factory=dict)
    away_since: datetime | None = None

    def offer(self, target: TargetVersion) -> Offer:
        """The offer of this version, which stays until the engine serves it."""
        last = self.offers.get(target.run_id)
        if last is None or last.target != target:
            self.offers[target.run_id] = Offer(target) if last is None else last.replaced(target)
        return self.offers[target.run_id]

    def trouble(self, run_id: str, target: TargetVersion | None, patience_seconds: float) -> str | None:
        """Says, for users, why the engine does not serve the run's target; None where it does or soon will."""
        status = self.status
        if status is None or (target is not None and (run_id, target.version) in _served(status)):
            return None
        if self.away_since is not None:
            return f"{status.detail} ({since(self.away_since)})"
        offer = self.offers.get(run_id)
        return None if offer is None else offer.trouble(patience_seconds)

    def went_away(self) -> None:
        """Notes that the engine does not answer as one: it may restart, and is then offered its version at once."""
        self.resumed = False
        self.away_since = self.away_since or utc_now()
        for offer in self.offers.values():
            offer.retry_now()


@dataclass
class Fleet:
    """Every engine that discovery lists for one pool."""

    settings: Settings
    discovery: EngineDiscovery
    database: Database
    notifications: Notifications
    pool: str = DEFAULT_POOL
    adapters: int | None = None
    """So many runs share the engines; None: one run has them."""

    def __post_init__(self) -> None:
        self._targets: dict[str, TargetVersion] = {}
        self._is_assigned = False
        self._members: dict[str, FleetMember] = {}
        self._found: FoundEngines | None = None
        self._weights = WeightCheck()

    @property
    def _target(self) -> TargetVersion | None:
        """The only target, of a pool whose runs take turns."""
        return next(iter(self._targets.values()), None)

    def set_target(self, target: TargetVersion) -> None:
        """Changes the version of the target's run that engines should serve."""
        if target == self._targets.get(target.run_id):
            return
        self._targets = {**(self._targets if self.adapters else {}), target.run_id: target}
        self._measure()
        for member in self._members.values():
            member.target_changed.set()

    def retain_targets(self, run_ids: Collection[str]) -> None:
        """Forgets the targets of other runs, whose adapters the engines may free; weights stay until others come.

        Engines that several runs share are left alone before the first call, after which the targets are complete.
        """
        if not self.adapters:
            return
        self._targets = {run_id: one for run_id, one in self._targets.items() if run_id in run_ids}
        self._measure()
        if not self._is_assigned:
            self._is_assigned = True
            for member in self._members.values():
                member.target_changed.set()

    def has_target(self, run_id: str, version: int) -> bool:
        """Whether engines are being brought to this version already."""
        target = self._targets.get(run_id)
        return target is not None and target.version == version

    def lost_version(self, run_id: str) -> int | None:
        """Returns the target version if it is of this run and its files are damaged or gone."""
        lost = self._weights.lost.get(run_id)
        return lost.version if lost is not None and lost == self._targets.get(run_id) else None

    def served_version(self, run_id: str) -> int | None:
        """Returns the oldest version of the run that an engine serves.

        None when no engine serves the run, or one has yet to leave a version after the target, as before an
        evaluation of an older version.
        """
        versions = [version for status in self._serving() for run, version in _served(status) if run == run_id]
        target = self._targets.get(run_id)
        if target is not None and max(versions, default=0) > target.version:
            return None
        return min(versions, default=None)

    def trouble(self, run_id: str) -> str | None:
        """Says, for users, why no engine serves the run's target or will soon; None when one does."""
        if self._found is not None and not self._found.urls:
            return f"pool {self.pool} has no engine"
        target, patience = self._targets.get(run_id), self.settings.engine_answer_seconds
        found = {url: member.trouble(run_id, target, patience) for url, member in self._members.items()}
        return None if None in found.values() else "; ".join(f"{url}: {why}" for url, why in found.items()) or None

    async def run(self) -> None:
        """Follows discovery for ever. Each engine has a task of its own, so that one that hangs delays no other."""
        timeout = httpx.Timeout(self.settings.engine_answer_seconds)
        tasks: dict[str, asyncio.Task[None]] = {}
        try:
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
        finally:
            # The controller that leads next measures them.
            SERVING.labels(self.pool).set(0)
            UNSERVED.labels(self.pool).set(0)

    def add(self, client: EngineClient) -> FleetMember:
        """Makes an engine a member; whoever adds it reconciles it."""
        self._members[client.url] = FleetMember(client)
        return self._members[client.url]

    def _serving(self, besides: FleetMember | None = None) -> list[EngineStatus]:
        found = [one.status for one in self._members.values() if one is not besides and one.status is not None]
        return [status for status in found if status.state is EngineState.SERVING]

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
        self._measure()
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
        if self.adapters and member.recent is None:
            # Before this poll stores another status.
            member.recent = await self._served_by_base(client.url)
        try:
            await self._resume_once(member)
            if self.adapters:
                if self._is_assigned:
                    await self._share(member)
                return
            label = await client.weight_version()
        # AttributeError: the HTTP client's answer to a connection that is reset while it opens.
        except (httpx.HTTPError, ValueError, AttributeError) as error:
            member.went_away()
            detail = f"{type(error).__name__}: {error}"[:500]
            await self._store(member, EngineStatus(client.url, EngineState.UNREACHABLE, detail=detail))
            return
        member.away_since = None
        if target is None or label == weight_version(target.run_id, target.version):
            member.offers.clear()
            await self._store(member, _status_of(client.url, label))
        elif member.offer(target).is_due(label):
            await self._offer(member, target, label)

    async def _offer(self, member: FleetMember, target: TargetVersion, label: str) -> None:
        """Brings an engine to the target and stores its status: that it serves it, or why it does not.

        Args: label: the weights that it serves
        """
        fault_point("controller.version_noticed")
        offer = member.offer(target)
        try:
            await self._weights.check(target)
            label = await self._update(member, target)
            member.offers.clear()
            status = _status_of(member.client.url, label)
        except (WeightsLost, OSError) as error:
            offer.wait_for_files(str(error)[:500])
            status = EngineStatus(member.client.url, EngineState.UNREACHABLE, detail=offer.cause)
        except (EngineRefused, httpx.HTTPError, ValueError, AttributeError) as error:
            UPDATES.labels("refused" if isinstance(error, EngineRefused) else "failed").inc()
            # A failed update may have left it paused.
            member.resumed = False
            offer.fail(str(error)[:500] or type(error).__name__, self.settings.engine_refusal_seconds, label)
            detail = offer.trouble(0)
            log.warning("version not loaded", url=member.client.url, version=target.version, cause=detail)
            status = EngineStatus(member.client.url, EngineState.UNREACHABLE, detail=detail)
        await self._store(member, status)

    async def _share(self, member: FleetMember) -> None:
        """Loads the adapters of the targets, stores which runs the engine serves, and frees the adapters of older ones.

        The version before a target stays: a gateway may send calls to it until it reads of the new one.
        """
        loaded, served, troubles = await member.client.adapters(), list[Adapter](), list[str]()
        member.away_since = None
        member.offers = {run_id: offer for run_id, offer in member.offers.items() if run_id in self._targets}
        last, recent = member.recent or {}, dict[str, tuple[str | None, ...]]()
        for run_id, target in list(self._targets.items()):
            name, before = _adapter_of(target), last.get(run_id) or _adapters_of(run_id, loaded)
            recent[run_id] = before
            if name is None or name in loaded:
                member.offers.pop(run_id, None)
            elif member.offer(target).is_due():
                await self._offer_adapter(member, target, name)
            if (offer := member.offers.get(run_id)) is not None:
                troubles.append(offer.trouble(0) or "")
                served += self._still_served(member, target, before[:1], loaded)
                continue
            recent[run_id] = (name, *(one for one in before if one != name))[:2]
            served.append(Adapter(run_id, target.version, name))
        detail = "; ".join(troubles) or None
        status = EngineStatus(member.client.url, EngineState.SERVING, detail=detail, adapters=tuple(served))
        await self._store(member, status)
        member.recent = recent
        await self._free_adapters(member, loaded.difference(*recent.values()))

    async def _served_by_base(self, url: str) -> dict[str, tuple[str | None, ...]]:
        """Returns the runs that an earlier controller served with the engine's base model: no adapter names them."""
        async with self.database.read() as session:
            rows = await serving_engines(session)
        return {row.run_id: (None,) for row in rows if row.url == url and row.is_shared and row.adapter is None}

    def _still_served(
        self, member: FleetMember, target: TargetVersion, last: Sequence[str | None], loaded: Collection[str]
    ) -> list[Adapter]:
        """Returns the version that an engine goes on serving that failed to load the target.

        None where another engine serves the target, whose run an old version would hold back; and none that is newer,
        as before an evaluation of an older version.

        Args: last: the adapter that the run was last served with; loaded: what the engine has
        """
        wanted = target.run_id, target.version
        if any(wanted in _served(status) for status in self._serving(besides=member)):
            return []
        found = [(parse_weight_version(name)[1] if name else 0, name) for name in last if not name or name in loaded]
        return [Adapter(target.run_id, version, name) for version, name in found if version < target.version]

    async def _free_adapters(self, member: FleetMember, names: Collection[str]) -> None:
        """Unloads adapters; an engine that does not answer in time frees them once their calls have ended.

        It answers no other request of this kind meanwhile, so that a request that is repeated would only wait there.
        """
        now = time.monotonic()
        member.freeing = {name: at for name, at in member.freeing.items() if name in names and at > now}
        for name in sorted(set(names) - member.freeing.keys()):
            try:
                await member.client.unload_adapter(name)
            except (EngineRefused, httpx.HTTPError) as error:
                limited_log.warning(
                    "adapter not unloaded",
                    url=member.client.url,
                    adapter=name,
                    cause=str(error) or type(error).__name__,
                )
                if isinstance(error, httpx.TimeoutException):
                    member.freeing[name] = time.monotonic() + self.settings.engine_refusal_seconds
                    return

    async def _offer_adapter(self, member: FleetMember, target: TargetVersion, name: str) -> None:
        """Loads the target's adapter, or notes in its offer why the engine does not have it."""
        offer = member.offer(target)
        try:
            await self._load_adapter(member.client, target, name)
            del member.offers[target.run_id]
        except (WeightsLost, OSError) as error:
            offer.wait_for_files(f"{name}: {error}"[:500])
        except (EngineRefused, httpx.TimeoutException) as error:
            UPDATES.labels("refused" if isinstance(error, EngineRefused) else "failed").inc()
            # SGLang loads nothing while an adapter that it frees has calls in flight, and is asked again at once.
            is_freeing = isinstance(error, httpx.TimeoutException) and bool(member.freeing)
            pause_seconds = 0.0 if is_freeing else self.settings.engine_refusal_seconds
            offer.fail(f"{name}: {error or type(error).__name__}"[:500], pause_seconds)

    async def _load_adapter(self, client: EngineClient, target: TargetVersion, name: str) -> None:
        await self._weights.check(target)
        try:
            with UPDATE_SECONDS.time():
                await client.load_adapter(name, str(Path(target.path) / ADAPTER_FOLDER))
        except EngineRefused as error:
            if _PARTLY_LOADED in str(error):
                await client.unload_adapter(name)
            raise
        fault_point("controller.adapter_loaded")
        if name not in await client.adapters():
            raise EngineRefused("it answered that it loaded the adapter, and does not list it")
        UPDATES.labels("done").inc()

    async def _update(self, member: FleetMember, target: TargetVersion) -> str:
        """Loads the target; returns its label, which the engine then serves.

        Raises: EngineRefused: the weights could not be loaded, or the engine said that they were and serves others
        """
        if self.settings.weights == "disk":
            await self._load(member, target)
        else:
            async with requested_transfer(self.database, self.notifications, member.client, target) as incoming:
                await self._load(member, target, incoming)
        label = await member.client.weight_version()
        if label != weight_version(target.run_id, target.version):
            raise EngineRefused(f"it answered that it loaded version {target.version}, and still serves {label!r}")
        UPDATES.labels("done").inc()
        return label

    async def _load(self, member: FleetMember, target: TargetVersion, incoming: IncomingWeights | None = None) -> None:
        # From here on gateways send no new calls to it.
        updating = EngineStatus(member.client.url, EngineState.UPDATING, detail=f"loading {target.version}")
        await self._store(member, updating)
        with UPDATE_SECONDS.time():
            await member.client.update(target, incoming)

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
        self._measure()
        await self.notifications.notify(Topic.ENGINES)

    def _measure(self) -> None:
        wanted = {(one.run_id, one.version) for one in self._targets.values()}
        served = [set(_served(status)) for status in self._serving()]
        SERVING.labels(self.pool).set(sum(bool(wanted) and wanted <= one for one in served))
        runs = {run_id for one in served for run_id, _ in one}
        UNSERVED.labels(self.pool).set(len(self._targets.keys() - runs))


def _served(status: EngineStatus) -> list[tuple[str, int]]:
    """Runs and versions that an engine serves."""
    shared = [(one.run_id, one.policy_version) for one in status.adapters]
    if status.run_id is None or status.policy_version is None:
        return shared
    return [(status.run_id, status.policy_version), *shared]


def _adapter_of(target: TargetVersion) -> str | None:
    """The name of the target's adapter; None for version 0, unless it is the run's own: a copy of another run's."""
    has_adapter = target.version > 0 or target.run_id in Path(target.path).parts
    return weight_version(target.run_id, target.version) if has_adapter else None


def _adapters_of(run_id: str, loaded: Collection[str]) -> tuple[str, ...]:
    """The run's loaded adapters, the newest first."""
    versions = [name.removeprefix(f"{run_id}:") for name in loaded if name.startswith(f"{run_id}:")]
    numbers = sorted((int(version) for version in versions if version.isdecimal()), reverse=True)
    return tuple(weight_version(run_id, number) for number in numbers)


def _status_of(url: str, label: str) -> EngineStatus:
    try:
        run_id, version = parse_weight_version(label)
    except ValueError:
        return EngineStatus(url, EngineState.UPDATING, detail=f"serves {label!r}, which no run gave it")
    return EngineStatus(url, EngineState.SERVING, run_id, version)
