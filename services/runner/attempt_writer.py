"""Group commit: attempts that start or end while a transaction runs share the next one.

While one transaction commits the next attempts gather, so the batch grows by itself with the load and a lone attempt
never waits for company.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from leyden.libs.faults import fault_point
from leyden.libs.queue import leases
from leyden.libs.queue.leases import Lease, Outcome
from leyden.libs.queue.notifications import Notifications, Topic
from leyden.libs.store.attempts import AttemptKey
from leyden.libs.store.database import AWAY, Database

MAX_ENTRIES = 64
"""In one transaction: outcomes hold the ends of outputs, megabytes each."""


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """An attempt that starts, or ends where there is an outcome; `valid` says whether its lease was still its own."""

    lease: Lease
    outcome: Outcome | None
    valid: asyncio.Future[bool]


class AttemptWriter:
    """Writes the arguments of `start` and `settle`, one transaction at a time."""

    def __init__(self, database: Database, notifications: Notifications) -> None:
        self._database = database
        self._notifications = notifications
        self._waiting: deque[_Entry] = deque()
        self._arrived = asyncio.Event()
        self._closed = False

    async def start(self, lease: Lease) -> bool:
        """Marks the attempt as running; false if it has lost its lease.

        Raises: the errors of a session; a repeat is harmless
        """
        return await self._write(lease, None)

    async def settle(self, lease: Lease, outcome: Outcome) -> bool:
        """Writes the outcome; false if the attempt has lost its lease, and then the outcome does not count.

        Raises: the errors of a session; a repeat is harmless
        """
        return await self._write(lease, outcome)

    async def run(self) -> None:
        """Writes until closed."""
        while not self._closed:
            await self._arrived.wait()
            batch = [self._waiting.popleft() for _ in range(min(MAX_ENTRIES, len(self._waiting)))]
            if not self._waiting:
                self._arrived.clear()
            await self._commit(batch)

    def close(self) -> None:
        """Lets `run` return; entries that still wait are not written."""
        self._closed = True
        self._arrived.set()

    async def _write(self, lease: Lease, outcome: Outcome | None) -> bool:
        entry = _Entry(lease, outcome, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        self._arrived.set()
        return await entry.valid

    async def _commit(self, batch: Sequence[_Entry]) -> None:
        try:
            valid = await self._transaction(batch)
        # The writer must live; the waiting attempt decides whether to try again.
        except Exception as error:  # noqa: BLE001
            if len(batch) > 1 and not isinstance(error, AWAY):
                # One entry that is refused must not take the others with it.
                for entry in batch:
                    await self._commit([entry])
                return
            for entry in batch:
                if not entry.valid.done():
                    entry.valid.set_exception(error)
            return
        ended = [AttemptKey(entry.lease.rollout_id, entry.lease.attempt) for entry in batch if entry.outcome]
        if ended:
            fault_point("runner.settled")
        for entry in batch:
            # The waiting attempt may have been cancelled.
            if not entry.valid.done():
                entry.valid.set_result(entry.lease.lease_id in valid)
        if ended:
            await self._notifications.notify(Topic.OUTCOMES)
            await self._notifications.publish_ended(ended)

    async def _transaction(self, batch: Sequence[_Entry]) -> set[str]:
        """The ids of the leases that were valid. An attempt stands in a batch once: it ends after it has started."""
        started = [entry.lease for entry in batch if entry.outcome is None]
        ended = [(entry.lease, entry.outcome) for entry in batch if entry.outcome is not None]
        async with self._database.session() as session:
            if started and ended:
                await leases.lock_all(session, [entry.lease for entry in batch])
            return await leases.start_all(session, started) | await leases.settle_all(session, ended)
