"""The runner's loop: take leases while there is room, run agents, renew, settle."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Sequence

from prometheus_client import Counter, Gauge, Histogram
from sqlalchemy.exc import SQLAlchemyError

from leyden.libs.capability import KeyRing
from leyden.libs.contracts.states import OutcomeKind
from leyden.libs.faults import fault_point
from leyden.libs.queue import leases
from leyden.libs.queue.connection import QueueUnavailable
from leyden.libs.queue.leases import Lease, Outcome
from leyden.libs.queue.notifications import Notifications
from leyden.libs.queue.stream import RolloutQueue
from leyden.libs.service import Checks, pause
from leyden.libs.store.attempts import AttemptKey
from leyden.libs.store.database import AWAY, Database, cause
from leyden.libs.store.schema import check_schema
from leyden.libs.telemetry import SECONDS_BUCKETS, RateLimitedLogger, bind, logger
from leyden.services.runner.attempt import Workplace, execute, prove
from leyden.services.runner.cell import Cells
from leyden.services.runner.doors import DoorWatch
from leyden.services.runner.folder import Folders
from leyden.services.runner.ledger import Ledger
from leyden.services.runner.process import Processes
from leyden.services.runner.settings import Settings

log = logger()
limited_log = RateLimitedLogger(log)

RUNNING = Gauge("runner_attempts_running", "Attempts at work.")
ENDED = Counter("runner_attempts_ended_total", "Attempts that were settled.", ["kind"])
LOST = Counter("runner_leases_lost_total", "Attempts stopped because their lease was lost or their rollout cancelled.")
SECONDS = Histogram("runner_attempt_seconds", "Lease to verdict.", buckets=SECONDS_BUCKETS)

GATHER_SECONDS = 0.05
LONGEST_RETRY_SECONDS = 60.0
"""The longest that a controller lets a failed rollout wait."""


class Runner:
    """The attempts of one process."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        queue: RolloutQueue,
        notifications: Notifications,
        place: Workplace,
    ) -> None:
        self.owner = place.folders.root.name
        self._settings = settings
        self._database = database
        self._queue = queue
        self._notifications = notifications
        self._ledger = Ledger(database, notifications)
        self._place = place
        self._tasks: set[asyncio.Task[None]] = set()
        self._held: dict[str, asyncio.Task[Outcome]] = {}
        self._room = asyncio.Event()
        self._room.set()
        self._stopping = False
        self._look_at = time.monotonic() + settings.store_look_seconds

    async def run(self, stop: asyncio.Event) -> None:
        """Works until asked to stop; then finishes what it holds, for a while. What is left is given back.

        Raises: what ended one of the loops beside: without renewals or a ledger this process is of no use.
        """
        loops = (self._renew(), self._ledger.run(), self._place.doors.keep())
        keeping = [asyncio.create_task(work) for work in loops]
        try:
            while not stop.is_set():
                await _first_of(self._room.wait(), stop.wait(), beside=keeping)
                if not stop.is_set():
                    await self._take(stop)
            await self._finish()
        finally:
            if not any(task.done() for task in keeping):
                await self._give_back()
            # Closed beside being cancelled: Redis' client may take a cancellation for its own timeout.
            self._ledger.close()
            for task in (*keeping, *self._tasks):
                task.cancel()
            await asyncio.gather(*keeping, *self._tasks, return_exceptions=True)

    async def _take(self, stop: asyncio.Event) -> None:
        """Leases as many rollouts as there is room for."""
        # Attempts end one by one; those that are leased together cost one transaction.
        if self._free() < self._settings.concurrency // 8 and await pause(stop, GATHER_SECONDS):
            return
        room = self._free()
        try:
            deliveries = await self._queue.deliver(self.owner, room, self._settings.poll_seconds)
            if not deliveries:
                await self._look_into_store(room)
            if deliveries:
                fault_point("runner.delivered")
            await self._lease_all([delivery.rollout_id for delivery in deliveries])
            await self._queue.ack(deliveries)
        except QueueUnavailable as error:
            limited_log.warning("task queue away, asking the store", cause=str(error))
            await self._take_from_store(room, rest_seconds=0.0)
            await pause(stop, self._settings.poll_seconds)
        except SQLAlchemyError as error:
            # Not acknowledged: delivered again.
            limited_log.warning("no lease taken", cause=cause(error))
            await pause(stop, self._settings.poll_seconds)

    def _free(self) -> int:
        return self._settings.concurrency - len(self._tasks)

    async def _look_into_store(self, room: int) -> None:
        """Now and then when nothing is delivered: a Redis that is full takes no messages, and nobody here is told."""
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + self._settings.store_look_seconds
            # What has just failed is tried again when the controller says so.
            await self._take_from_store(room, rest_seconds=LONGEST_RETRY_SECONDS)

    async def _take_from_store(self, room: int, *, rest_seconds: float) -> None:
        try:
            async with self._database.read() as session:
                waiting = await leases.deliverable_rollouts(session, limit=room, rest_seconds=rest_seconds)
            await self._lease_all(waiting)
        except SQLAlchemyError as error:
            limited_log.warning("no lease taken", cause=cause(error))

    async def _lease_all(self, rollout_ids: Sequence[str]) -> None:
        async with self._database.session() as session:
            taken = await leases.lease_rollouts(session, rollout_ids, self.owner, self._settings.lease_seconds)
        if taken:
            fault_point("runner.leased")
        for lease in taken:
            task = asyncio.create_task(self._attempt(lease), name=f"{lease.rollout_id}/{lease.attempt}")
            self._tasks.add(task)
            task.add_done_callback(self._done)
        self._measure()
        # Leasing anew expires the attempt before.
        await self._notifications.publish_ended(
            AttemptKey(one.rollout_id, one.attempt - 1) for one in taken if one.attempt > 1
        )

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
            began = time.monotonic()
            outcome = await self._outcome(lease)
            SECONDS.observe(time.monotonic() - began)
            fault_point("runner.ended")
            await self._settle(lease, outcome)

    async def _outcome(self, lease: Lease) -> Outcome:
        """How the attempt ends; `cancelled` or `infra_error` when this runner stops it itself."""
        running = asyncio.create_task(self._execute(lease))
        self._held[lease.lease_id] = running
        try:
            return await running
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                # This task was cancelled, and the agent's with it: its tree is dead by now.
                raise
            if self._stopping:
                return Outcome(OutcomeKind.INFRA_ERROR, detail="the runner was stopped")
            return Outcome(OutcomeKind.CANCELLED, detail="the lease was lost or the rollout cancelled")
        finally:
            del self._held[lease.lease_id]

    async def _execute(self, lease: Lease) -> Outcome:
        try:
            if not await self._start(lease):
                return Outcome(OutcomeKind.CANCELLED, detail="the lease was lost before the start")
            fault_point("runner.started")
            log.info("attempt started")
            return await execute(lease, self._place)
        # Whatever breaks on our side is told as such; an attempt that nobody settles would block until its lease ends.
        except Exception as error:
            log.exception("attempt broke")
            return Outcome(OutcomeKind.INFRA_ERROR, detail=f"{type(error).__name__}: {error}")

    async def _start(self, lease: Lease) -> bool:
        """Whether the lease is still held; waits for a store that is away until `_renew` gives the lease up."""
        while True:
            try:
                return await self._ledger.start(lease)
            except AWAY as error:
                limited_log.warning("attempt not started", cause=cause(error))
                await asyncio.sleep(min(1.0, self._settings.poll_seconds))

    async def _settle(self, lease: Lease, outcome: Outcome) -> None:
        """Writes the outcome; tries again while the store is away, for as long as the lease would live."""
        until = time.monotonic() + self._settings.lease_seconds
        while True:
            try:
                held = await self._ledger.settle(lease, outcome)
                break
            except SQLAlchemyError as error:
                limited_log.warning("outcome not settled", cause=cause(error))
                if time.monotonic() > until:
                    return
                await asyncio.sleep(min(1.0, self._settings.poll_seconds))
        if held:
            ENDED.labels(outcome.kind).inc()
        log.info("attempt ended", kind=outcome.kind, settled=held, detail=outcome.detail)

    async def _renew(self) -> None:
        """Renews every lease in one statement, three times per lease time; what is not renewed is stopped."""
        renewed = time.monotonic()
        while True:
            await asyncio.sleep(self._settings.lease_seconds / 3)
            asked, held = set(self._held), None
            try:
                async with self._database.session() as session:
                    held = await leases.heartbeat_all(session, asked, self._settings.lease_seconds)
                renewed = time.monotonic()
            except SQLAlchemyError as error:
                limited_log.warning("leases not renewed", cause=cause(error))
            if held is None and time.monotonic() - renewed > self._settings.lease_seconds:
                # Another runner may have them by now.
                held = set()
            for lease_id in asked - held if held is not None else ():
                self._stop_attempt(lease_id)

    def _stop_attempt(self, lease_id: str) -> None:
        running = self._held.get(lease_id)
        if running is not None:
            LOST.inc()
            running.cancel()

    async def _finish(self) -> None:
        """Lets attempts finish, for a while."""
        if self._tasks:
            log.info("draining", attempts=len(self._tasks))
            await asyncio.wait(self._tasks, timeout=self._settings.drain_seconds)

    async def _give_back(self) -> None:
        """Kills the attempts that are left and settles them, so that they are tried again."""
        self._stopping = True
        while self._tasks:
            for running in self._held.values():
                if not running.cancelling():
                    running.cancel()
            # Again: one that was leased just now begins to run its agent only in a moment.
            await asyncio.wait(self._tasks, timeout=0.1)


async def _first_of(*waits: Awaitable[object], beside: Sequence[asyncio.Task[None]]) -> None:
    """Returns when one of the waits is over. Raises what ended one of the tasks beside, which never should end."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait([*tasks, *beside], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    for task in beside:
        if task.done():
            task.result()


async def run_runner(settings: Settings, stop: asyncio.Event, checks: Checks) -> None:
    """Executes attempts until asked to stop.

    Raises: Misconfigured: the settings name what is not there, or agents cannot start here.
    """
    cells = Cells(settings)
    keys = KeyRing(settings.capability_keys_file)
    folders = Folders(cells.work_folder, f"runner-{os.getpid()}-{secrets.token_hex(4)}")
    processes = Processes()
    processes.adopt_orphans()
    database = Database(settings.database_url, "leyden-runner", answer_seconds=settings.database_answer_seconds)
    doors = DoorWatch([settings.gateway_url, settings.collector_url], database.ping)
    queue = RolloutQueue(settings.redis_url, answer_seconds=settings.redis_answer_seconds)
    notifications = Notifications(settings.redis_url)
    checks.add("database", database.ping)
    checks.add("schema", lambda: check_schema(database))
    checks.add("queue", queue.ping)
    try:
        place = Workplace(settings, keys, folders, processes, doors, cells)
        await prove(place)
        await Runner(settings, database, queue, notifications, place).run(stop)
    finally:
        await queue.close()
        await notifications.close()
        await database.close()
        processes.close()
        await asyncio.to_thread(folders.close)
