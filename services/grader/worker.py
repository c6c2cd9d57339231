"""The loop: lease attempts that wait for their grades while there is room, grade them, settle their totals.

Several graders are safe: each attempt has one lease, which its grader renews. The attempts of a grader that dies are
graded again when their leases end, and its results change nothing, because settling needs the lease.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge, Histogram

from leyden.libs.faults import fault_point
from leyden.libs.grading.facts import AttemptFacts
from leyden.libs.grading.ledger import ledger
from leyden.libs.grading.pool import Pool
from leyden.libs.queue.notifications import Notifications, Topic
from leyden.libs.service import Checks
from leyden.libs.store.attempts import AttemptKey
from leyden.libs.store.database import Database, Refused, Session, StoreAway
from leyden.libs.store.group_commit import GroupCommit
from leyden.libs.store.runs.grading import (
    GradingLease,
    Lane,
    Settled,
    heartbeat_gradings,
    lease_gradings,
    lease_groups,
    lease_suspects,
    postpone_gradings,
    release_gradings,
    settle_gradings,
)
from leyden.libs.store.schema import check_schema
from leyden.libs.telemetry import SECONDS_BUCKETS, RateLimitedLogger, bind, logger
from leyden.services.grader.code import Code
from leyden.services.grader.judge import Judge
from leyden.services.grader.settings import Settings
from leyden.services.grader.sources import Sources, broken, count_use
from leyden.services.grader.trials import Trials

if TYPE_CHECKING:
    from leyden.services.grader.containers.jobs import Containers

LEASED = Gauge("grader_attempts_leased", "Attempts that this process grades.")
SETTLED = Counter(
    "grader_attempts_settled_total", "Attempts with a settled grading, by whether they have a total.", ["result"]
)
COMPONENTS = Counter("grader_components_total", "Components of settled attempts.", ["source", "state"])
RETRIES = Counter("grader_retries_total", "Attempts that are graded again, because a grader's process ended.")
SECONDS = Histogram("grader_component_seconds", "Time of one component.", ["source"], buckets=SECONDS_BUCKETS)

MAX_TRIES = 3
"""Leases of an attempt, after which a component whose process ends has failed."""
PAUSE_SECONDS = 1.0
"""Pause after the first failed try; it doubles with each."""
PER_PROCESS = 32
"""Leased attempts for each process. Why: they share transactions. With 4 one process
graded 6,400 attempts a minute, with 32 it grades 20,000."""
RETRY_SECONDS = 1.0
GATHER_SECONDS = 0.02
"""Gradings that end within this time share a lease statement."""
MAX_SETTLED = 64
"""Attempts of one transaction."""

Lease = Callable[[Session, str, int, float], Awaitable[list[list[GradingLease]]]]
"""Leases the attempts that are graded together, by owner, most, and seconds."""

log = logger()
limited_log = RateLimitedLogger(log)


async def work(settings: Settings, stop: asyncio.Event, checks: Checks) -> None:
    """Grades until the event is set; it finishes the attempts that it has first."""
    database = Database(
        settings.database_url,
        "leyden-grader",
        pool_size=settings.database_pool_size,
        answer_seconds=settings.database_answer_seconds,
        idle_seconds=settings.lease_seconds,
    )
    checks.add("database", database.ping)
    checks.add("schema", lambda: check_schema(database))
    judge = Judge(settings.providers, calls=settings.judge_calls, seconds=settings.judge_seconds)
    pool = Pool(settings.processes, settings.component_seconds)
    code = Code(settings, pool.pids)
    containers = _containers(settings)
    sources = Sources(database, pool, judge, code, containers)
    # One that waits for slow judges or programs holds up no attempt of another one.
    most: list[tuple[Lease, int]] = [
        (partial(_lease_each, lane=Lane.INSTANT), PER_PROCESS * settings.processes),
        (partial(_lease_each, lane=Lane.JUDGE), settings.judge_calls),
        (partial(_lease_each, lane=Lane.CODE), max(1, settings.code_processes)),
        (partial(_lease_each, lane=Lane.CONTAINER), max(1, settings.container_jobs)),
        (lease_groups, settings.judge_calls),
        # One at a time: if it ends this process, it takes no try from another one that may be innocent.
        (lease_suspects, 1),
    ]
    graders = [Grader(settings, database, sources, lease, number) for lease, number in most]
    try:
        async with asyncio.TaskGroup() as group:
            for grader in graders:
                group.create_task(grader.run(stop))
            group.create_task(Trials(database, sources, settings.lease_seconds).run(stop))
    finally:
        await pool.close()
        await judge.close()
        await code.close()
        if containers is not None:
            await containers.close()
        await database.close()


def _containers(settings: Settings) -> Containers | None:
    if not settings.container_jobs:
        return None
    # Here, since the client of Kubernetes costs a second and 40 MB to import.
    from leyden.services.grader.containers.jobs import Containers

    return Containers(settings)


async def _lease_each(
    session: Session, owner: str, count: int, seconds: float, *, lane: Lane
) -> list[list[GradingLease]]:
    return [[one] for one in await lease_gradings(session, owner, count, seconds, lane=lane)]


class Grader:
    """The attempts that one process grades. Args: lease: takes attempts, or groups of them; most: of those at once"""

    def __init__(self, settings: Settings, database: Database, sources: Sources, lease: Lease, most: int) -> None:
        self._settings = settings
        self._database = database
        self._notifications = Notifications(settings.redis_url)
        self._sources = sources
        self._lease_some = lease
        self._owner = f"{socket.gethostname()}:{os.getpid()}"
        self._most = most
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._live: set[str] = set()
        self._commits = GroupCommit[Settled](self._write, max_items=MAX_SETTLED, hold_seconds=settings.lease_seconds)

    async def run(self, stop: asyncio.Event) -> None:
        """Works until asked to stop, and leaves what it cannot finish to another grader.

        Raises: the error of a loop beside: without renewals or a writer this process is of no use.
        """
        beside = [asyncio.create_task(loop) for loop in (self._renew(), self._commits.run())]
        try:
            while not stop.is_set():
                room = self._most - len(set(self._tasks.values()))
                leased = await self._lease(room) if room else []
                for leases in leased:
                    self._start(leases)
                await self._wait(stop, beside, is_full=len(leased) == room)
                for task in beside:
                    if task.done():
                        task.result()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        finally:
            held = list(self._tasks)
            ending = [*self._tasks.values(), *beside]
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)
            # Otherwise they count as tries: what they grade may be what ended this process.
            if held and stop.is_set():
                await self._release(held)
            await self._notifications.close()

    async def _release(self, leases: Sequence[str]) -> None:
        try:
            async with self._database.session() as session:
                await release_gradings(session, leases)
        except (StoreAway, Refused) as error:
            log.warning("gradings not released: their leases end by themselves", cause=str(error))

    async def _lease(self, count: int) -> list[list[GradingLease]]:
        try:
            async with self._database.session() as session:
                leased = await self._lease_some(session, self._owner, count, self._settings.lease_seconds)
        except (StoreAway, Refused) as error:
            limited_log.warning("nothing leased", cause=str(error))
            await asyncio.sleep(RETRY_SECONDS)
            return []
        if leased:
            fault_point("grader.leased")
        return leased

    def _start(self, leases: Sequence[GradingLease]) -> None:
        task = asyncio.create_task(self._grade(leases), name=f"{leases[0].rollout_id}/{leases[0].attempt}")
        self._tasks |= dict.fromkeys((one.lease_id for one in leases), task)
        LEASED.inc(len(leases))
        task.add_done_callback(lambda ended: self._ended(leases, ended))

    def _ended(self, leases: Sequence[GradingLease], task: asyncio.Task[None]) -> None:
        for one in leases:
            del self._tasks[one.lease_id]
        LEASED.dec(len(leases))
        if not task.cancelled() and task.exception() is not None:
            log.error("grading broke", attempt=task.get_name(), exc_info=task.exception())

    async def _wait(self, stop: asyncio.Event, beside: Sequence[asyncio.Task[None]], *, is_full: bool) -> None:
        """Waits for room where there is none, and otherwise for attempts to grade."""
        stopped = asyncio.create_task(stop.wait())
        waits: list[asyncio.Task[bool]] = [stopped]
        if not is_full:
            seconds = self._settings.poll_seconds
            waits.append(asyncio.create_task(self._woken(seconds)))
        try:
            ended = self._tasks.values() if is_full else ()
            await asyncio.wait({*waits, *ended, *beside}, return_when=asyncio.FIRST_COMPLETED)
            if is_full:
                await asyncio.sleep(GATHER_SECONDS)
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _woken(self, seconds: float) -> bool:
        await self._notifications.wait(Topic.GRADINGS, timeout_seconds=seconds)
        return True

    async def _renew(self) -> None:
        """Renews every lease three times per lease time; an attempt that loses its lease is graded by another."""
        while True:
            await asyncio.sleep(self._settings.lease_seconds / 3)
            held = list(self._tasks)
            try:
                async with self._database.session() as session:
                    renewed = await heartbeat_gradings(session, held, self._settings.lease_seconds)
            except (StoreAway, Refused) as error:
                limited_log.warning("leases not renewed", cause=str(error))
                continue
            for lease_id in set(held) - renewed:
                if task := self._tasks.get(lease_id):
                    task.cancel()

    async def _grade(self, leases: Sequence[GradingLease]) -> None:
        """Settles attempts that are compared in one transaction, so that no sibling is graded without the others."""
        first = leases[0]
        with bind(run_id=first.run_id, rollout_id=first.rollout_id, attempt=first.attempt):
            siblings = [(AttemptKey(one.rollout_id, one.attempt), _facts(one)) for one in leases]
            try:
                try:
                    graded = await self._sources.grade(first.reward, siblings)
                except (StoreAway, Refused):
                    raise
                except Exception as error:  # it would be leased again without end
                    log.error("grading broke", exc_info=error)
                    graded = [[broken(error)] * len(first.reward.components)] * len(siblings)
                finally:
                    await count_use(self._database, self._sources.judge, first.run_id)
                fault_point("grader.graded")
                crashes = [one.grade.explanation for row in graded for one in row if one.crashed]
                if crashes and min(one.tries for one in leases) < MAX_TRIES:
                    await self._postpone(leases, crashes)
                else:
                    found = [ledger(one.reward, row) for one, row in zip(leases, graded, strict=True)]
                    await self._commits.submit([Settled(one, *of) for one, of in zip(leases, found, strict=True)])
                    await self._forget(leases)
            # The lease ends, and the attempt is graded again.
            except (StoreAway, Refused) as error:
                limited_log.warning("not graded", cause=str(error))

    async def _postpone(self, leases: Sequence[GradingLease], causes: Sequence[str]) -> None:
        RETRIES.inc(len(leases))
        tries = min(one.tries for one in leases)
        log.warning("grading failed", tries=tries, cause=causes)
        async with self._database.session() as session:
            await postpone_gradings(session, [one.lease_id for one in leases], PAUSE_SECONDS * 2 ** (tries - 1))

    async def _forget(self, leases: Sequence[GradingLease]) -> None:
        """Ends what the settled attempts left at work. Those of a lost lease are another grader's."""
        settled = [one for one in leases if one.lease_id in self._live]
        self._live -= {one.lease_id for one in leases}
        attempts = [AttemptKey(one.rollout_id, one.attempt) for one in settled]
        await self._sources.forget(leases[0].reward, attempts)

    async def _write(self, settled: Sequence[Settled], _may_exist: bool) -> None:
        async with self._database.session() as session:
            live = await settle_gradings(session, settled)
        fault_point("grader.settled")
        self._live |= live
        for one in settled:
            if one.lease.lease_id in live:
                _count(one)
        await self._notifications.notify(Topic.OUTCOMES)


def _facts(lease: GradingLease) -> AttemptFacts:
    wait = lease.reward.wait
    return AttemptFacts(
        task=lease.task,
        output=lease.output,
        line_reward=lease.line_reward,
        calls=lease.calls,
        tools=lease.tools,
        feedback=lease.feedback,
        waited_seconds=wait.seconds if wait else 0.0,
    )


def _count(settled: Settled) -> None:
    SETTLED.labels("none" if settled.total is None else "total").inc()
    for one in settled.components:
        COMPONENTS.labels(one.source, one.state).inc()
        SECONDS.labels(one.source).observe(one.duration_seconds)
    if settled.total is None:
        limited_log.warning("attempt without a reward", rollout_id=settled.lease.rollout_id, cause=settled.reason)
