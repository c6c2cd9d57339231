"""Group commit: items that arrive while one transaction commits share the next one.

A lone item never waits for company, and the batch grows by itself with the load.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from leyden.libs.store.database import Refused, StoreAway
from leyden.libs.telemetry import RateLimitedLogger, logger

RETRY_SECONDS = 0.25

log = logger()
limited_log = RateLimitedLogger(log)

Item = TypeVar("Item")


@dataclass(slots=True, eq=False)
class _Submission(Generic[Item]):
    items: Sequence[Item]
    stored: asyncio.Future[None]
    deadline: float
    may_exist: bool = False


class GroupCommit(Generic[Item]):
    """Writes submissions in batches, one transaction at a time.

    Args: write: makes items durable, all or none; its flag says that an earlier try may have committed some of them. It
        raises `StoreAway` where it should be repeated, and `Refused`; max_items: of one transaction, more only where
        one submission has more; hold_seconds: how long a submission waits for a store that is away
    """

    def __init__(
        self, write: Callable[[Sequence[Item], bool], Awaitable[None]], *, max_items: int, hold_seconds: float
    ) -> None:
        self._write = write
        self._max_items = max_items
        self._hold_seconds = hold_seconds
        self._pending: list[_Submission[Item]] = []
        self._is_away = False
        self._arrived = asyncio.Event()
        self._drained = asyncio.Event()

    async def submit(self, items: Sequence[Item]) -> None:
        """Returns once the items are durable, all in one transaction. Cancelling the wait does not stop the write.

        Raises: StoreAway: the store was away for longer than `hold_seconds`; Refused
        """
        loop = asyncio.get_running_loop()
        submission = _Submission(items, loop.create_future(), loop.time() + self._hold_seconds)
        self._pending.append(submission)
        self._arrived.set()
        await submission.stored

    async def run(self) -> None:
        """Writes until cancelled."""
        while True:
            await self._arrived.wait()
            await self._write_batch(self._next_batch())
            if not self._pending:
                self._arrived.clear()

    async def drain(self) -> None:
        """Returns when nothing is pending; for a shutdown, while `run` still runs."""
        while self._pending:
            self._drained.clear()
            await self._drained.wait()

    def _next_batch(self) -> list[_Submission[Item]]:
        batch: list[_Submission[Item]] = []
        count = 0
        for submission in self._pending:
            count += len(submission.items)
            if batch and count > self._max_items:
                break
            batch.append(submission)
        return batch

    async def _write_batch(self, batch: list[_Submission[Item]]) -> None:
        may_exist = any(submission.may_exist for submission in batch)
        for submission in batch:
            submission.may_exist = True
        try:
            await self._write([item for submission in batch for item in submission.items], may_exist)
        except StoreAway as error:
            limited_log.warning(
                "store away", items=sum(len(submission.items) for submission in batch), cause=str(error)
            )
            now = asyncio.get_running_loop().time()
            for submission in batch:
                if now >= submission.deadline:
                    self._settle(submission, error)
            # The first failure may be that of a connection alone, which broke between two batches.
            if self._is_away:
                await asyncio.sleep(RETRY_SECONDS)
            self._is_away = True
        # The loop must live: these items may be wrong in any way, and the next ones fine.
        except Exception as error:
            if len(batch) > 1:
                # One bad submission must not fail the others of its batch.
                for submission in batch:
                    await self._write_batch([submission])
                return
            if not isinstance(error, Refused):
                log.exception("items not written")
            self._settle(batch[0], error if isinstance(error, Refused) else Refused(str(error)))
        else:
            self._is_away = False
            for submission in batch:
                self._settle(submission, None)

    def _settle(self, submission: _Submission[Item], error: Exception | None) -> None:
        self._pending.remove(submission)
        if not self._pending:
            self._drained.set()
        # The waiter may have been cancelled.
        if submission.stored.done():
            return
        if error is None:
            submission.stored.set_result(None)
            return
        submission.stored.set_exception(error)
        # The waiter may be cancelled before it wakes: asyncio would warn of an exception that nobody fetched.
        submission.stored.exception()
