"""Writes how long requests wait and whether their answers arrive; no request waits for these rows.

A request that waits gets its row while it waits. The rows of delivered answers are written some at a time.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from leyden.libs.store.database import Database, Refused, StoreAway
from leyden.libs.store.group_commit import GroupCommit
from leyden.libs.store.records.deliveries import (
    BEGIN_SECONDS,
    NewDelivery,
    forget_gateways,
    write_deliveries,
)
from leyden.libs.telemetry import RateLimitedLogger, logger

MAX_ROWS = 1024
GATHER_SECONDS = 0.1
"""Rows of delivered answers wait so long for company."""
SIGN_SECONDS = 0.5
"""Time between signs of life."""
IDLE_SECONDS = 600.0
"""A gateway without requests for this long gives no more signs of life."""

MAX_HELD = 100_000
"""Rows that wait for the store; some 50 MB."""
DRAIN_SECONDS = 5.0
"""A gateway that stops waits so long for the store, beyond the time that its calls wait."""

log = logger()
limited_log = RateLimitedLogger(log)


@dataclass(slots=True, eq=False)
class Delivery:
    """The client's side of one request. `arrived_at` and `left_at` are `time.perf_counter()`.

    `left_at`: when the last client left before it had its answer; None while one is there. `has_call`: it has a call of
    its own, whose end ends it.
    """

    row: NewDelivery
    arrived_at: float
    left_at: float | None = None
    begins: asyncio.TimerHandle | None = None
    on_wait: Callable[[], None] = lambda: None
    """Called once when the request has waited for `BEGIN_SECONDS`."""
    is_begun: bool = False
    has_call: bool = False
    is_ended: bool = False

    def seconds(self) -> float:
        """From its arrival until its client left, or until now."""
        return (self.left_at or time.perf_counter()) - self.arrived_at


class _Losing(NamedTuple):
    timer: asyncio.TimerHandle
    end: Callable[[], None]


class Deliveries:
    """Watches requests from their arrival to the end of their answers.

    Rows wait in memory while the store is away, at most `MAX_HELD` of them.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._gateway = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._commits = GroupCommit[NewDelivery](self._write, max_items=MAX_ROWS, hold_seconds=math.inf)
        self._held = 0
        self._gathered: list[NewDelivery] = []
        self._gathering: asyncio.TimerHandle | None = None
        self._writing: set[asyncio.Task[None]] = set()
        self._open: set[Delivery] = set()
        self._losing: dict[Delivery, _Losing] = {}
        self._ended_at = -math.inf
        self._started_at: float | None = None

    def watch(self, row: NewDelivery, arrived_at: float) -> Delivery:
        """Begins a request: unless it ends before, its row is written after `BEGIN_SECONDS`."""
        delivery = Delivery(replace(row, gateway=self._gateway), arrived_at)
        delivery.begins = asyncio.get_running_loop().call_later(BEGIN_SECONDS, self._begin, delivery)
        self._open.add(delivery)
        return delivery

    def _begin(self, delivery: Delivery) -> None:
        delivery.is_begun = True
        self._submit([delivery.row])
        delivery.on_wait()

    def end_early(self, delivery: Delivery, *, delivered: bool | None) -> None:
        """Ends a request without a call of its own, all of whose time was a wait for the platform.

        Args: delivered: False: the platform failed it; None: the client left, or joined the call of an earlier try. A
            short request has a row only where the platform failed it.
        """
        if delivery.is_begun or delivered is False:
            self.end(delivery, delivered=delivered, waited_seconds=delivery.seconds())
            return
        delivery.is_ended = True
        self._open.discard(delivery)
        if delivery.begins is not None:
            delivery.begins.cancel()

    def end(self, delivery: Delivery, *, delivered: bool | None, waited_seconds: float) -> None:
        """Ends a request; a later end counts only where its answer was delivered after all."""
        if delivery.begins is not None:
            delivery.begins.cancel()
        if (losing := self._losing.pop(delivery, None)) is not None:
            losing.timer.cancel()
        self._open.discard(delivery)
        self._ended_at = time.monotonic()
        if delivery.is_ended and not delivered:
            return
        delivery.is_ended = True
        row = replace(delivery.row, waited_seconds=waited_seconds, seconds=delivery.seconds(), delivered=delivered)
        if delivered:
            self._gather(row)
        else:
            self._submit([row])

    def lose(self, delivery: Delivery, waited_seconds: float, after_seconds: float) -> None:
        """Ends a request whose answer is complete and whose client left, unless a repeat gets the answer before.

        Until then its row has no end, and the controller waits for it.
        """
        delivery.left_at = delivery.left_at or time.perf_counter()
        if delivery.is_ended or delivery in self._losing:
            return
        ending = partial(self.end, delivery, delivered=False, waited_seconds=waited_seconds)
        timer = asyncio.get_running_loop().call_later(after_seconds, ending)
        self._losing[delivery] = _Losing(timer, ending)

    def end_lost(self, rollout_id: str | None = None, attempt: int | None = None) -> None:
        """Ends the lost requests of an attempt, or all of them: no repeat comes any more."""
        for delivery, losing in list(self._losing.items()):
            if rollout_id is None or (delivery.row.rollout_id, delivery.row.attempt) == (rollout_id, attempt):
                losing.end()

    def replayed(self, row: NewDelivery) -> None:
        """Notes that a stored answer was delivered to a repeat of its request."""
        # At once: until then its call counts as lost.
        self._submit([replace(row, gateway=self._gateway, waited_seconds=0.0, seconds=0.0, delivered=True)])

    async def run(self) -> None:
        """Writes until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._commits.run())
            group.create_task(self._give_signs())

    async def drain(self) -> None:
        """Writes every row and ends the controller's waiting; for a shutdown, while `run` still runs."""
        self.end_lost()
        self._flush()
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                while self._writing:
                    await asyncio.wait(self._writing)
        if self._held:
            log.warning("deliveries lost", rows=self._held, cause="the gateway stops and the store is away")
        self._ended_at = -math.inf
        await self._forget()

    async def _give_signs(self) -> None:
        """The controller waits for what a living gateway has not written, and an idle one has nothing to write."""
        await self._forget()
        while True:
            await asyncio.sleep(SIGN_SECONDS)
            if self._open or time.monotonic() < self._ended_at + IDLE_SECONDS:
                self._submit([])

    async def _forget(self) -> None:
        try:
            await forget_gateways(self._database, self._gateway)
        except (StoreAway, Refused) as error:
            limited_log.warning("gateways not forgotten", cause=str(error))

    def _gather(self, row: NewDelivery) -> None:
        self._gathered.append(row)
        if self._gathering is None:
            self._gathering = asyncio.get_running_loop().call_later(GATHER_SECONDS, self._flush)

    def _flush(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
        self._gathering = None
        rows, self._gathered = self._gathered, []
        if rows:
            self._submit(rows)

    def _submit(self, rows: Sequence[NewDelivery]) -> None:
        if self._held + len(rows) > MAX_HELD:
            limited_log.warning("deliveries lost", rows=len(rows), cause="too many wait for the store")
            return
        task = asyncio.create_task(self._stored(rows))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _stored(self, rows: Sequence[NewDelivery]) -> None:
        self._held += len(rows)
        try:
            await self._commits.submit(rows)
        except Refused as error:
            limited_log.warning("deliveries lost", rows=len(rows), cause=str(error))
        finally:
            self._held -= len(rows)

    async def _write(self, rows: Sequence[NewDelivery], _may_exist: bool) -> None:
        # Rows that are submitted while this write waits are in none: its sign of life is as old as its beginning.
        self._started_at = self._started_at or time.monotonic()
        await write_deliveries(self._database, self._gateway, rows, started_at=self._started_at)
        self._started_at = None
