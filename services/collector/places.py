"""The places of rewards: the store tells whether an attempt has the answer or the tool call that a reward names."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

from leyden.libs.store.database import Database
from leyden.libs.store.records.spans import NewReward, UnknownPlaces, unknown_places
from leyden.services.collector.conventions import Sender


@dataclass(frozen=True, slots=True)
class _LookUp:
    rewards: list[NewReward]
    answer: asyncio.Task[UnknownPlaces]


class Places:
    """Looks up the ids that rewards name.

    An attempt has one look-up at a time, so that ids which it invents leave the store's few connections to others.
    Rewards that come meanwhile share the next one: each reads all answers of the attempt, however many ids it asks for.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._next: dict[Sender, _LookUp] = {}
        self._turns: WeakValueDictionary[Sender, asyncio.Lock] = WeakValueDictionary()

    async def unknown(self, sender: Sender, rewards: Sequence[NewReward]) -> UnknownPlaces:
        """The ids that these rewards of the sender name and no answer of it has, beside those of other requests.

        Raises: StoreAway
        """
        look_up = self._next.get(sender)
        if look_up is None:
            look_up = self._next[sender] = _LookUp([], asyncio.create_task(self._look_up(sender)))
        look_up.rewards.extend(rewards)
        # Why shielded: one request's end concerns no other.
        return await asyncio.shield(look_up.answer)

    async def _look_up(self, sender: Sender) -> UnknownPlaces:
        async with self._turns.setdefault(sender, asyncio.Lock()):
            rewards = self._next.pop(sender).rewards
            async with self._database.read() as session:
                return await unknown_places(session, rewards)
