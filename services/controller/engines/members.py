"""The engines of one pool as the controller knows them: what each served at the last poll, and what it was offered."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from datetime import datetime

from prometheus_client import Counter, Gauge, Histogram

from leyden.libs.contracts.states import EngineState
from leyden.libs.queue.notifications import Notifications, Topic
from leyden.libs.store.database import Database
from leyden.libs.store.engines import EngineStatus, write_engines
from leyden.libs.telemetry import SECONDS_BUCKETS, logger
from leyden.services.controller.engines.canaries import Canaries
from leyden.services.controller.engines.client import EngineClient
from leyden.services.controller.engines.files import WeightCheck
from leyden.services.controller.engines.offers import Offer, since, utc_now
from leyden.services.controller.engines.targets import TargetVersion
from leyden.services.controller.settings import Settings

log = logger()

STORE_AGAIN_SECONDS = 10.0
"""How often an unchanged status is stored again."""

UPDATES = Counter("controller_engine_updates_total", "Weight updates of engines.", ["result"])
UPDATE_SECONDS = Histogram("controller_engine_update_seconds", "Pause to continue.", buckets=SECONDS_BUCKETS)
SERVING = Gauge("controller_engines_serving", "Engines that serve the target version of every run.", ["pool"])
UNSERVED = Gauge(
    "controller_runs_unserved", "Runs at work with a target version that no engine serves any version of.", ["pool"]
)


@dataclass(eq=False)
class FleetMember:
    """One engine: its status at the last poll, and by run the version that it was offered and does not serve."""

    client: EngineClient
    target_changed: asyncio.Event = field(default_factory=asyncio.Event)
    status: EngineStatus | None = None
    stored_at: float = 0.0
    """By the monotonic clock."""
    resumed: bool = False
    recent: dict[str, tuple[str | None, ...]] | None = None
    """By run the adapter that it was last served with, and the one before; None before the first poll."""
    freeing: dict[str, float] = field(default_factory=dict)
    """Adapters that the engine has not freed in time, and when to ask again."""
    offers: dict[str, Offer] = field(default_factory=dict)
    away_since: datetime | None = None
    compared: dict[str, int] = field(default_factory=dict)
    """By run the version at which it was compared with the trainer since that was delivered."""

    def has_compared(self, target: TargetVersion) -> bool:
        """Whether the engine has been compared at this version, or cannot be."""
        return self.compared.get(target.run_id) == target.version

    def offer(self, target: TargetVersion) -> Offer:
        """The offer of this version, which stays until the engine serves it."""
        last = self.offers.get(target.run_id)
        if last is None or last.target != target:
            self.offers[target.run_id] = Offer(target) if last is None else last.replaced(target)
        return self.offers[target.run_id]

    def trouble(self, run_id: str, target: TargetVersion | None, patience_seconds: float) -> str | None:
        """Says, for users, why the engine does not serve the run's target; None where it does or soon will."""
        status = self.status
        if status is None or (target is not None and (run_id, target.version) in served_by(status)):
            return None
        if self.away_since is not None:
            return f"{status.detail} ({since(self.away_since)})"
        offer = self.offers.get(run_id)
        return None if offer is None else offer.trouble(patience_seconds)

    def went_away(self) -> None:
        """Notes that the engine does not answer as one: it may restart, and is then offered its version at once."""
        self.resumed = False
        self.compared.clear()
        self.away_since = self.away_since or utc_now()
        for offer in self.offers.values():
            offer.retry_now()

    async def resume_once(self) -> None:
        """At the first poll: a controller that was killed between pause and continue left the engine paused."""
        if not self.resumed:
            await self.client.resume()
            self.resumed = True


@dataclass
class Members:
    """All engines of a pool, by address, and the target of each run; the one place that stores an engine's status."""

    settings: Settings
    database: Database
    notifications: Notifications
    pool: str
    targets: dict[str, TargetVersion] = field(default_factory=dict)
    at_work: frozenset[str] = frozenset()
    """Runs that have the engines now; a target may stay after its run."""
    by_url: dict[str, FleetMember] = field(default_factory=dict)
    weights: WeightCheck = field(default_factory=WeightCheck)

    def __post_init__(self) -> None:
        self._canaries = Canaries(self.database)

    async def compare(self, member: FleetMember, target: TargetVersion, adapter: str | None = None) -> str | None:
        """Compares an engine with the trainer once after each delivery.

        Args:    adapter: the one that serves the version
        Returns: why the engine serves something else, for users; None where it does not, or nothing shows it
        Raises:  httpx.HTTPError: the connection broke; StoreAway
        """
        if member.has_compared(target):
            return None
        verdict = await self._canaries.ask(member.client, target, adapter)
        if verdict.is_final and verdict.problem is None:
            member.compared[target.run_id] = target.version
        return verdict.problem

    def wake(self) -> None:
        """Lets every engine be polled now."""
        for member in self.by_url.values():
            member.target_changed.set()

    def serving(self, besides: FleetMember | None = None) -> list[EngineStatus]:
        """The statuses of engines that serve."""
        found = [one.status for one in self.by_url.values() if one is not besides and one.status is not None]
        return [status for status in found if status.state is EngineState.SERVING]

    async def store(self, member: FleetMember, status: EngineStatus) -> None:
        """Stores a status that differs from the last one, and any other one now and then: a leader that lost its place
        may have written over it."""
        is_new, now = member.status != status, time.monotonic()
        if not is_new and now - member.stored_at < STORE_AGAIN_SECONDS:
            return
        async with self.database.session() as session:
            await write_engines(session, [status], self.pool)
        member.status, member.stored_at = status, now
        if not is_new:
            return
        log.info("engine seen", url=status.url, state=status.state, version=status.policy_version, detail=status.detail)
        self.measure()
        await self.notifications.notify(Topic.ENGINES)

    def measure(self) -> None:
        """Sets the gauges of this pool."""
        wanted = {(one.run_id, one.version) for one in self.targets.values()}
        served = [set(served_by(status)) for status in self.serving()]
        SERVING.labels(self.pool).set(sum(bool(wanted) and wanted <= one for one in served))
        runs = {run_id for one in served for run_id, _ in one}
        UNSERVED.labels(self.pool).set(len((self.targets.keys() & self.at_work) - runs))


def served_by(status: EngineStatus) -> list[tuple[str, int]]:
    """Runs and versions that an engine serves."""
    shared = [(one.run_id, one.policy_version) for one in status.adapters]
    if status.run_id is None or status.policy_version is None:
        return shared
    return [(status.run_id, status.policy_version), *shared]
