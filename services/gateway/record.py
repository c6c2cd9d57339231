"""The durable record: calls that end at about the same time share one transaction.

While one transaction commits the next calls gather, so the batch grows by itself with the load and a lone call never
waits for company. Nobody's answer leaves before its transaction has committed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from leyden.libs.store.calls import CallRefused, NewCall, StoreAway
from leyden.libs.telemetry import RateLimitedLogger, logger
from leyden.services.gateway.errors import GatewayError, Unavailable
from leyden.services.gateway.metrics import RECORD_ROWS, RECORD_SECONDS

MAX_ROWS = 512
RETRY_SECONDS = 0.25

log = logger()
limited_log = RateLimitedLogger(log)


class Writer(Protocol):
    """Where calls become durable: `leyden.libs.store.calls.CallWriter`, or memory in tests."""

    async def write(self, calls: Sequence[NewCall], *, may_exist: bool = False) -> None:
        """All calls, or none, durable on return."""

    async def close(self) -> None:
        """Lets go of connections."""


@dataclass(slots=True, eq=False)
class _Pending:
    calls: Sequence[NewCall]
    stored: asyncio.Future[None]
    deadline: float
    may_exist: bool = False


class Recorder:
    """Writes calls in groups, one transaction at a time.

    Args: hold_seconds: how long a call waits for a store that is away
    """

    def __init__(self, writer: Writer, *, hold_seconds: float) -> None:
        self._writer = writer
        self._hold_seconds = hold_seconds
        self._pending: list[_Pending] = []
        self._arrived = asyncio.Event()
        self._drained = asyncio.Event()

    async def record(self, calls: Sequence[NewCall]) -> None:
        """Returns once the calls, the choices of one request, are durable. Cancelling the wait does not stop the write.

        Raises: Unavailable: the store was away for longer than a record is held; GatewayError: it will never take them
        """
        loop = asyncio.get_running_loop()
        pending = _Pending(calls, loop.create_future(), loop.time() + self._hold_seconds)
        self._pending.append(pending)
        self._arrived.set()
        began = time.perf_counter()
        await pending.stored
        RECORD_SECONDS.observe(time.perf_counter() - began)

    async def run(self) -> None:
        """Writes until cancelled."""
        while True:
            await self._arrived.wait()
            await self._write_batch()

    async def drain(self) -> None:
        """Returns when nothing is pending; for shutdown, while `run` is still running."""
        while self._pending:
            self._drained.clear()
            await self._drained.wait()

    async def _write_batch(self) -> None:
        batch = self._next_batch()
        try:
            await self._write(batch)
        except StoreAway as error:
            limited_log.warning("store away", calls=len(batch), cause=str(error))
            self._expire(batch)
            await asyncio.sleep(RETRY_SECONDS)
        except CallRefused as error:
            if len(batch) == 1:
                self._refuse(batch[0], error)
            for pending in batch if len(batch) > 1 else []:
                await self._write_alone(pending)
        # The loop must live: whatever is wrong with these calls, the next ones may be fine.
        except Exception as error:
            log.exception("calls not written", calls=len(batch))
            for pending in batch:
                self._refuse(pending, error)
        if not self._pending:
            self._arrived.clear()

    def _next_batch(self) -> list[_Pending]:
        batch: list[_Pending] = []
        rows = 0
        for pending in self._pending:
            if batch and rows + len(pending.calls) > MAX_ROWS:
                break
            batch.append(pending)
            rows += len(pending.calls)
        return batch

    async def _write(self, batch: list[_Pending]) -> None:
        calls = [call for pending in batch for call in pending.calls]
        may_exist = any(pending.may_exist for pending in batch)
        for pending in batch:
            pending.may_exist = True
        await self._writer.write(calls, may_exist=may_exist)
        RECORD_ROWS.observe(len(calls))
        for pending in batch:
            self._settle(pending, None)

    async def _write_alone(self, pending: _Pending) -> None:
        # One refused call must not take the others of its batch with it.
        try:
            await self._write([pending])
        except CallRefused as error:
            self._refuse(pending, error)
        except StoreAway:
            self._expire([pending])
        except Exception as error:
            log.exception("calls not written", calls=1)
            self._refuse(pending, error)

    def _expire(self, batch: list[_Pending]) -> None:
        now = asyncio.get_running_loop().time()
        for pending in batch:
            if now >= pending.deadline:
                message = "The call's record could not be stored, so its answer is withheld; try again."
                self._settle(pending, Unavailable(message, code="store_unavailable", retry_after_seconds=5))

    def _refuse(self, pending: _Pending, error: Exception) -> None:
        log.error("call refused by the store", call_id=pending.calls[0].id, error=str(error))
        self._settle(pending, GatewayError("The call's record was refused by the store.", code="record_refused"))

    def _settle(self, pending: _Pending, error: GatewayError | None) -> None:
        self._pending.remove(pending)
        if not self._pending:
            self._drained.set()
        # Whoever waited may have been cancelled.
        if pending.stored.done():
            return
        if error is None:
            pending.stored.set_result(None)
            return
        pending.stored.set_exception(error)
        # It may be cancelled yet before it wakes: an exception that nobody fetches is no accident.
        pending.stored.exception()
