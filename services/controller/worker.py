"""The controller's process: waits for the lock, and leads with the engines and trainers of its settings."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from prometheus_client import Gauge

from leyden.libs.contracts.config import DEFAULT_POOL
from leyden.libs.queue.notifications import Notifications
from leyden.libs.queue.stream import RolloutQueue
from leyden.libs.service import Checks, pause
from leyden.libs.store.database import Database, StoreAway
from leyden.libs.store.engines import Pool, write_pools
from leyden.libs.store.locks import AdvisoryLock, LockLost
from leyden.libs.store.runs import failure_rewards
from leyden.libs.store.runs.trainer_ends import StoredEnds
from leyden.libs.store.schema import check_schema
from leyden.libs.telemetry import RateLimitedLogger, logger
from leyden.services.controller.engines.adapters import Adapters
from leyden.services.controller.engines.discovery import EngineDiscovery, StaticEngines
from leyden.services.controller.engines.embedders import Embedders
from leyden.services.controller.engines.fleet import Fleet
from leyden.services.controller.engines.members import Members
from leyden.services.controller.engines.turns import Turns
from leyden.services.controller.loop import lead
from leyden.services.controller.runs.enqueueing import ROLLOUTS_QUEUED
from leyden.services.controller.settings import PoolSettings, Settings
from leyden.services.controller.tick import Controller
from leyden.services.controller.trainers.backend import TrainerBackend
from leyden.services.controller.trainers.process import ProcessTrainers
from leyden.services.controller.trainers.supervisor import TrainerSupervisor
from leyden.services.controller.upkeep.alarms import judge_forever
from leyden.services.controller.upkeep.deletion import delete_forever
from leyden.services.controller.upkeep.publishing import publish_forever
from leyden.services.controller.upkeep.retention import forget_forever, prune_forever
from leyden.services.controller.upkeep.webhook import deliver_forever

if TYPE_CHECKING:
    from leyden.libs.kubernetes.cluster import Cluster

log = logger()
limited_log = RateLimitedLogger(log)

LEADING = Gauge("controller_leading", "1 while this process leads.")

LOCK_NAME = "controller"
CLIENT = "leyden-controller"


async def run_controller(settings: Settings, stop: asyncio.Event, checks: Checks) -> None:
    """Leads whenever no other controller does, until asked to stop."""
    answer_seconds = settings.database_answer_seconds
    database = Database(settings.database_url, CLIENT, answer_seconds=answer_seconds)
    notifications = Notifications(settings.redis_url)
    queue = RolloutQueue(settings.redis_url, answer_seconds=settings.redis_answer_seconds)
    checks.add("database", database.ping)
    checks.add("schema", lambda: check_schema(database))
    checks.add("queue", queue.ping)
    cluster = await _cluster(settings)
    try:
        while not stop.is_set():
            lock = AdvisoryLock(settings.database_url, LOCK_NAME, CLIENT, answer_seconds=answer_seconds)
            try:
                if await lock.acquire():
                    log.info("leading")
                    LEADING.set(1)
                    await _lead(settings, database, queue, notifications, cluster, lock, stop)
            except (StoreAway, LockLost) as error:
                limited_log.warning("not leading", cause=str(error))
            finally:
                await lock.release()
                LEADING.set(0)
                # The next leader counts.
                ROLLOUTS_QUEUED.set(0)
            await pause(stop, 1.0)
    finally:
        await queue.close()
        await notifications.close()
        await database.close()
        if cluster is not None:
            await cluster.close()


async def _lead(
    settings: Settings,
    database: Database,
    queue: RolloutQueue,
    notifications: Notifications,
    cluster: Cluster | None,
    lock: AdvisoryLock,
    stop: asyncio.Event,
) -> None:
    """Here alone the settings decide where trainers and engines are."""
    trainers = TrainerSupervisor(settings, _trainer_backend(settings, cluster), StoredEnds(database))
    fleets = {
        name: make_fleet(settings, _engine_discovery(pool, cluster), database, notifications, name, pool.adapters)
        for name, pool in settings.engine_pools().items()
        if not pool.embeddings
    }
    embedders = [
        make_embedders(settings, _engine_discovery(pool, cluster), database, notifications, name)
        for name, pool in settings.engine_pools().items()
        if pool.embeddings
    ]
    controller = Controller(settings, database, queue, notifications, fleets, trainers)
    beside = [fleet.run() for fleet in (*fleets.values(), *embedders)]
    beside += [prune_forever(settings, database), delete_forever(settings, database)]
    beside += [forget_forever(database), publish_forever(settings, database)]
    beside += [judge_forever(settings, database), deliver_forever(settings, database)]
    try:
        await take_over(settings, database)
        await lead(controller.tick, controller.notified, beside, lock, stop)
    finally:
        await trainers.close()


def make_fleet(
    settings: Settings,
    discovery: EngineDiscovery,
    database: Database,
    notifications: Notifications,
    pool: str = DEFAULT_POOL,
    adapters: int | None = None,
) -> Fleet:
    """The engines of one pool, with its way of delivery."""
    members = Members(settings, database, notifications, pool)
    return Fleet(discovery, members, Adapters(members) if adapters else Turns(members), adapters)


def make_embedders(
    settings: Settings, discovery: EngineDiscovery, database: Database, notifications: Notifications, pool: str
) -> Fleet:
    """The engines of a pool that embeds."""
    members = Members(settings, database, notifications, pool)
    return Fleet(discovery, members, Embedders(members))


async def take_over(settings: Settings, database: Database) -> None:
    """Writes the pools of the settings, which API, gateways and trainers read, and what an earlier leader left."""
    pools = [
        Pool(
            name,
            str(one.model_path or "") or None,
            one.context_length,
            one.adapters,
            one.max_adapter_rank,
            one.embeddings,
        )
        for name, one in settings.engine_pools().items()
    ]
    async with database.session() as session:
        await write_pools(session, pools)
        await failure_rewards.decide_late(session)


async def _cluster(settings: Settings) -> Cluster | None:
    discovers = any(pool.engine_service for pool in settings.engine_pools().values())
    if settings.trainer_backend == "process" and not discovers:
        return None
    assert settings.namespace is not None
    # Here, since its client costs a second and 40 MB to import.
    from leyden.libs.kubernetes.cluster import Cluster, connect

    return Cluster(await connect(), settings.namespace, settings.owner_role)


def _trainer_backend(settings: Settings, cluster: Cluster | None) -> TrainerBackend:
    if settings.trainer_backend == "process":
        return ProcessTrainers(settings)
    assert cluster is not None
    from leyden.services.controller.trainers.kubernetes import KubernetesTrainers

    return KubernetesTrainers(settings, cluster)


def _engine_discovery(pool: PoolSettings, cluster: Cluster | None) -> EngineDiscovery:
    if pool.engine_service is None:
        return StaticEngines(pool.engine_urls)
    assert cluster is not None
    from leyden.services.controller.engines.kubernetes import KubernetesEngines

    return KubernetesEngines(cluster, pool.engine_service)
