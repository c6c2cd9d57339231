"""Writes starts and ends of attempts; those that happen while a transaction runs share the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leyden.libs.faults import fault_point
from leyden.libs.queue import leases
from leyden.libs.queue.leases import Lease, Outcome
from leyden.libs.queue.notifications import Notifications, Topic
from leyden.libs.store.attempts import AttemptKey
from leyden.libs.store.database import Database
from leyden.libs.store.group_commit import GroupCommit

MAX_ENTRIES = 64
"""In one transaction: outcomes hold the ends of outputs, megabytes each."""


@dataclass(slots=True, eq=False)
class _Entry:
    """An attempt that starts, or ends where there is an outcome; the write says whether its lease was still valid."""

    lease: Lease
    outcome: Outcome | None
    valid: bool = False


class AttemptWriter:
    """Writes the arguments of `start` and `settle` while `run` runs.

    Args: hold_seconds: how long an attempt waits for a store that is away
    """

    def __init__(self, database: Database, notifications: Notifications, *, hold_seconds: float) -> None:
        self._database = database
        self._notifications = notifications
        self._commits = GroupCommit[_Entry](self._write, max_items=MAX_ENTRIES, hold_seconds=hold_seconds)
        self.run = self._commits.run

    async def start(self, lease: Lease) -> bool:
        """Marks the attempt as running; false if it has lost its lease.

        Raises: StoreAway: for longer than an attempt waits; Refused. A repeat is harmless
        """
        return await self._submit(_Entry(lease, None))

    async def settle(self, lease: Lease, outcome: Outcome) -> bool:
        """Writes the outcome; false if the attempt has lost its lease, and then the outcome does not count.

        Raises: StoreAway: for longer than an attempt waits; Refused. A repeat is harmless
        """
        return await self._submit(_Entry(lease, outcome))

    async def _submit(self, entry: _Entry) -> bool:
        await self._commits.submit([entry])
        return entry.valid

    async def _write(self, entries: Sequence[_Entry], _may_exist: bool) -> None:
        """One transaction. An attempt that stands in it twice starts before it ends."""
        started = [entry.lease for entry in entries if entry.outcome is None]
        ended = [(entry.lease, entry.outcome) for entry in entries if entry.outcome is not None]
        async with self._database.session() as session:
            if started and ended:
                await leases.lock_all(session, [entry.lease for entry in entries])
            valid = await leases.start_all(session, started) | await leases.settle_all(session, ended)
        for entry in entries:
            entry.valid = entry.lease.lease_id in valid
        if ended:
            fault_point("runner.settled")
            await self._notifications.notify(Topic.OUTCOMES)
            await self._notifications.publish_ended(AttemptKey(one.rollout_id, one.attempt) for one, _ in ended)
