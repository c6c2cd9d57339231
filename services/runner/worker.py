"""The runner's loop: lease rollouts while there is room, execute them, renew the leases, settle."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Sequence

from prometheus_client import Counter, Gauge, Histogram

from leyden.libs.attempts.endpoint_monitor import EndpointMonitor
from leyden.libs.capability import KeyRing
from leyden.libs.contracts.states import OutcomeKind
from leyden.libs.faults import fault_point
from leyden.libs.queue import leases
from leyden.libs.queue.connection import QueueUnavailable
from leyden.libs.queue.leases import Lease, Outcome
from leyden.libs.queue.notifications import Notifications
from leyden.libs.queue.stream import RolloutQueue
from leyden.libs.service import Checks, pause
from leyden.libs.store.attempts import AttemptKey, running_attempts
from leyden.libs.store.database import Database, Refused, StoreAway
from leyden.libs.store.schema import check_schema
from leyden.libs.telemetry import SECONDS_BUCKETS, RateLimitedLogger, bind, logger
from leyden.services.runner.attempt import RunnerContext, execute
from leyden.services.runner.attempt_writer import AttemptWriter
from leyden.services.runner.backends.base import Backend
from leyden.services.runner.settings import Settings

log = logger()
limited_log = RateLimitedLogger(log)

RUNNING = Gauge("runner_attempts_running", "Attempts at work.")
ENDED = Counter("runner_attempts_ended_total", "Attempts that were settled.", ["kind"])
LOST = Counter("runner_leases_lost_total", "Attempts stopped because their lease was lost or their rollout cancelled.")
SECONDS = Histogram("runner_attempt_seconds", "Lease to outcome.", buckets=SECONDS_BUCKETS)

GATHER_SECONDS = 0.05
STORE_POLL_SECONDS = 5.0
"""The interval at which a runner without deliveries polls Postgres itself for waiting rollouts."""


class Runner:
    """The attempts of one process.

    Args: owner: the name under which it leases.
    """

    def __init__(
        self,
        owner: str,
        database: Database,
        queue: RolloutQueue,
        notifications: Notifications,
        context: RunnerContext,
    ) -> None:
        self._owner = owner
        self._settings = context.settings
        self._database = database
        self._queue = queue
        self._notifications = notifications
        self._writer = AttemptWriter(database, notifications, hold_seconds=self._settings.lease_seconds)
        self._context = context
        self._tasks: set[asyncio.Task[None]] = set()
        self._executing: dict[str, asyncio.Task[Outcome]] = {}
        self._room = asyncio.Event()
        self._room.set()
        self._stopping = False
        self._store_poll_at = time.monotonic() + STORE_POLL_SECONDS

    async def run(self, stop: asyncio.Event) -> None:
        """Works until asked to stop; then lets attempts finish, for a while, and gives the others back. Agents that
        outlive this process stay at work: their leases run on until another runner adopts them.

        Raises: the error of a loop beside: without renewals or a writer this process is of no use.
        """
        loops = [
            asyncio.create_task(loop)
            for loop in (self._renew(), self._adopt(), self._writer.run(), self._context.endpoints.run())
        ]
        try:
            while not stop.is_set():
                await _first_of(self._room.wait(), stop.wait(), beside=loops)
                if not stop.is_set():
                    await self._lease_some(stop)
            if self._tasks:
                log.info("draining", attempts=len(self._tasks))
                await asyncio.wait(self._tasks, timeout=self._settings.drain_seconds)
        finally:
            if not any(task.done() for task in loops) and not self._agents_outlive_this:
                await self._give_back()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await _end(loops)

    async def _lease_some(self, stop: asyncio.Event) -> None:
        """Leases as many rollouts as there is room for."""
        # Attempts end one by one; leased together, they cost one transaction.
        nearly_full = len(self._tasks) > self._settings.concurrency * 7 // 8
        if nearly_full and await pause(stop, GATHER_SECONDS):
            return
        room = self._settings.concurrency - len(self._tasks)
        if room <= 0:
            # Attempts were adopted meanwhile.
            return
        try:
            deliveries = await self._queue.deliver(self._owner, room, self._settings.poll_seconds)
            if deliveries:
                fault_point("runner.delivered")
            elif time.monotonic() >= self._store_poll_at:
                # Now and then when nothing is delivered: a full Redis drops messages silently.
                self._store_poll_at = time.monotonic() + STORE_POLL_SECONDS
                await self._lease_from_store(room)
            await self._lease([delivery.rollout_id for delivery in deliveries])
            await self._queue.ack(deliveries)
        except QueueUnavailable as error:
            limited_log.warning("task queue away, asking the store", cause=str(error))
            # Delivered rollouts may be at work by now: the queue may have failed after their delivery.
            if (room := self._settings.concurrency - len(self._tasks)) > 0:
                await self._lease_from_store(room)
            await pause(stop, self._settings.poll_seconds)
        except (StoreAway, Refused) as error:
            # Not acknowledged: delivered again.
            limited_log.warning("nothing leased", cause=str(error))
            await pause(stop, self._settings.poll_seconds)

    async def _lease_from_store(self, room: int) -> None:
        try:
            async with self._database.read() as session:
                waiting = await leases.deliverable_rollouts(session, room, runner_types=[*self._context.backends])
            await self._lease(waiting)
        except (StoreAway, Refused) as error:
            limited_log.warning("nothing leased", cause=str(error))

    async def _lease(self, rollout_ids: Sequence[str]) -> None:
        async with self._database.session() as session:
            leased = await leases.lease_rollouts(
                session, rollout_ids, self._owner, self._settings.lease_seconds, [*self._context.backends]
            )
        if leased:
            fault_point("runner.leased")
        self._start(leased)
        # Leasing anew expires the attempt before.
        await self._notifications.publish_ended(
            AttemptKey(one.rollout_id, one.attempt - 1) for one in leased if one.attempt > 1
        )

    def _start(self, leased: Sequence[Lease]) -> None:
        for lease in leased:
            task = asyncio.create_task(self._attempt(lease), name=f"{lease.rollout_id}/{lease.attempt}")
            self._tasks.add(task)
            task.add_done_callback(self._done)
        self._measure()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._measure()
        if not task.cancelled() and task.exception() is not None:
            log.error("attempt broke", attempt=task.get_name(), exc_info=task.exception())

    def _measure(self) -> None:
        RUNNING.set(len(self._tasks))
        if len(self._tasks) < self._settings.concurrency:
            self._room.set()
        else:
            self._room.clear()

    async def _attempt(self, lease: Lease) -> None:
        with bind(run_id=lease.run_id, rollout_id=lease.rollout_id, attempt=lease.attempt):
            started = time.monotonic()
            outcome = await self._outcome(lease)
            SECONDS.observe(time.monotonic() - started)
            fault_point("runner.ended")
            if await self._settle(lease, outcome):
                await self._remove(lease)

    async def _outcome(self, lease: Lease) -> Outcome:
        """The outcome of the attempt; `cancelled` or `infra_error` when this runner stops it itself."""
        executing = asyncio.create_task(self._execute(lease))
        self._executing[lease.lease_id] = executing
        try:
            return await executing
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                # This task was cancelled, and the agent's with it: its tree is dead by now.
                raise
            if self._stopping:
                return Outcome(OutcomeKind.INFRA_ERROR, detail="the runner was stopped")
            return Outcome(OutcomeKind.CANCELLED, detail="the lease was lost or the rollout cancelled")
        finally:
            del self._executing[lease.lease_id]

    async def _execute(self, lease: Lease) -> Outcome:
        try:
            if not await self._writer.start(lease):
                return Outcome(OutcomeKind.CANCELLED, detail="the lease was lost before the start")
            fault_point("runner.started")
            log.info("attempt started")
            return await execute(lease, self._context)
        # Any defect on our side is reported as ours; an attempt that nobody settles would block until its lease ends.
        except Exception as error:
            log.exception("attempt broke")
            return Outcome(OutcomeKind.INFRA_ERROR, detail=f"{type(error).__name__}: {error}")

    async def _settle(self, lease: Lease, outcome: Outcome) -> bool:
        """Writes the outcome, and returns whether it counts; waits for a store that is away as long as the lease would
        live."""
        try:
            settled = await self._writer.settle(lease, outcome)
        except (StoreAway, Refused) as error:
            # As many lines as attempts otherwise: an outage longer than a lease ends them all.
            limited_log.warning("outcome not settled", cause=str(error))
            return False
        if settled:
            ENDED.labels(outcome.kind).inc()
        log.info("attempt ended", kind=outcome.kind, settled=settled, detail=outcome.detail)
        return settled

    async def _remove(self, lease: Lease) -> None:
        """Removes what is left of an agent. One whose outcome does not count is left to the runner that adopted it, and
        `_adopt` discards one that nobody wants."""
        if (backend := self._context.backends.get(lease.runner.type)) is not None:
            await backend.remove(lease.rollout_id, lease.attempt, lease.runner)

    async def _renew(self) -> None:
        """Renews every lease in one statement, three times per lease time; an attempt that loses its lease stops."""
        renewed = time.monotonic()
        while True:
            await asyncio.sleep(self._settings.lease_seconds / 3)
            asked, valid = set(self._executing), None
            try:
                async with self._database.session() as session:
                    valid = await leases.heartbeat_all(session, asked, self._settings.lease_seconds)
                renewed = time.monotonic()
            except (StoreAway, Refused) as error:
                limited_log.warning("leases not renewed", cause=str(error))
            if valid is None and time.monotonic() - renewed > self._settings.lease_seconds:
                # Another runner may have them by now.
                valid = set()
            for lease_id in asked - valid if valid is not None else ():
                if lease_id in self._executing:
                    LOST.inc()
                    self._executing[lease_id].cancel()

    async def _adopt(self) -> None:
        """Takes over all running agents of runners that are gone, and stops agents whose attempt has ended."""
        while True:
            await asyncio.sleep(self._settings.lease_seconds / 10)
            for backend in self._context.backends.values():
                found = [AttemptKey(*one) for one in await backend.survivors()]
                if not found:
                    continue
                try:
                    async with self._database.session() as session:
                        wanted = await running_attempts(session, found)
                        seconds = self._settings.lease_seconds
                        # No free place is asked for: their agents run already, and would be killed.
                        adopted = await leases.adopt_silent(session, sorted(wanted), self._owner, seconds)
                except (StoreAway, Refused) as error:
                    limited_log.warning("no attempt adopted", cause=str(error))
                    continue
                if adopted:
                    log.info("attempts adopted", attempts=len(adopted))
                self._start(adopted)
                # Side by side: a slow cluster takes seconds for each.
                unwanted = [one for one in found if one not in wanted]
                await asyncio.gather(*(backend.discard(one.rollout_id, one.attempt) for one in unwanted))

    @property
    def _agents_outlive_this(self) -> bool:
        return all(backend.agents_outlive_runner for backend in self._context.backends.values())

    async def _give_back(self) -> None:
        """Kills the remaining attempts and settles them, so that they are tried again."""
        self._stopping = True
        while self._tasks:
            for executing in self._executing.values():
                if not executing.cancelling():
                    executing.cancel()
            # Again: an attempt leased just now begins to run its agent only in a moment.
            await asyncio.wait(self._tasks, timeout=0.1)


async def _first_of(*waits: Awaitable[object], beside: Sequence[asyncio.Task[None]]) -> None:
    """Returns when one of the waits is over. Raises the error of a task beside, none of which should ever end."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait([*tasks, *beside], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    for task in beside:
        if task.done():
            task.result()


async def _end(loops: Sequence[asyncio.Task[None]]) -> None:
    """Cancels the loops until they have ended: Redis' client may take a cancellation for its own timeout."""
    while pending := [task for task in loops if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=1.0)


async def run_runner(settings: Settings, stop: asyncio.Event, checks: Checks) -> None:
    """Executes attempts until asked to stop.

    Raises: Misconfigured: a setting cannot be followed, or agents cannot start here.
    """
    keys = KeyRing(settings.capability_keys_file)
    owner = f"runner-{os.getpid()}-{secrets.token_hex(4)}"
    backends = await _backends(settings, owner)
    database = Database(
        settings.database_url,
        "leyden-runner",
        answer_seconds=settings.database_answer_seconds,
        # Inside a transaction a process that stands still holds the rows of its attempts, which nobody else can lease.
        idle_seconds=settings.lease_seconds,
    )
    endpoints = EndpointMonitor([settings.gateway_url, settings.collector_url], database.ping)
    queue = RolloutQueue(settings.redis_url, runner_type=settings.backend, answer_seconds=settings.redis_answer_seconds)
    notifications = Notifications(settings.redis_url)
    checks.add("database", database.ping)
    checks.add("schema", lambda: check_schema(database))
    checks.add("queue", queue.ping)
    try:
        for backend in backends.values():
            await backend.check()
        context = RunnerContext(settings, keys, backends, endpoints)
        await Runner(owner, database, queue, notifications, context).run(stop)
    finally:
        await queue.close()
        await notifications.close()
        await endpoints.close()
        await database.close()
        for backend in backends.values():
            await backend.close()


async def _backends(settings: Settings, owner: str) -> dict[str, Backend]:
    """The backends of this runner's place, by `runner.type`."""
    if settings.backend == "kubernetes":
        assert settings.namespace is not None
        # Here, since its client costs a second and 40 MB to import.
        from leyden.libs.kubernetes.cluster import Cluster, connect
        from leyden.services.runner.backends.kubernetes.backend import KubernetesBackend

        cluster = Cluster(await connect(), settings.namespace, settings.owner_role)
        return {"kubernetes": KubernetesBackend(settings, cluster)}
    from leyden.services.runner.backends.container.backend import ContainerBackend
    from leyden.services.runner.backends.process import ProcessBackend

    containers = ContainerBackend(settings, owner)
    # First: a container of a dead runner still uses its workspace, which the other backend removes.
    await containers.remove_abandoned()
    return {"process": ProcessBackend(settings, owner), "container": containers}
