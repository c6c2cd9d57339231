"""Delivery of rollout ids to runners through a Redis stream for each place of agents: machines, and clusters.

The controller can restore the stream at any time: it enqueues `leases.deliverable_rollouts`, and no rollout enters
twice. A runner acknowledges a delivery once it has the lease; from then on Postgres stores the owner. A
delivery without an acknowledgement goes to another runner after `reclaim_seconds`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis.exceptions import ResponseError

from leyden.libs.queue.connection import ANSWER_SECONDS, MAX_BLOCK_SECONDS, answering, connect
from leyden.libs.telemetry import logger

log = logger()

# Braces keep all keys on one node of a Redis cluster.
_STREAM = "{leyden:rollouts}"
_GROUP = "runners"
_ROLLOUT_ID = re.compile(r"[\w.:-]{1,200}", re.ASCII)

# The hash maps each rollout to its message; a message lost by a flush or an eviction is written again.
# A key of the wrong type is deleted, because the stream can be restored.
_ENQUEUE = """
for key, kind in pairs({[KEYS[1]] = 'stream', [KEYS[2]] = 'hash'}) do
    local found = redis.call('TYPE', key).ok
    if found ~= kind and found ~= 'none' then
        redis.call('DEL', key)
    end
end
local added = 0
for _, rollout in ipairs(ARGV) do
    local message = redis.call('HGET', KEYS[2], rollout)
    if not message or #redis.call('XRANGE', KEYS[1], message, message) == 0 then
        redis.call('HSET', KEYS[2], rollout, redis.call('XADD', KEYS[1], '*', 'rollout', rollout))
        added = added + 1
    end
end
return added
"""

_ACK = """
for i = 2, #ARGV, 2 do
    redis.pcall('XACK', KEYS[1], ARGV[1], ARGV[i])
    redis.call('XDEL', KEYS[1], ARGV[i])
    if redis.call('HGET', KEYS[2], ARGV[i + 1]) == ARGV[i] then
        redis.call('HDEL', KEYS[2], ARGV[i + 1])
    end
end
"""
_BATCH = 1000
DEAD_SECONDS = 3600.0
"""A consumer idle for this long without a delivery is removed; live runners read every few seconds."""


@dataclass(frozen=True)
class Delivery:
    """One rollout id delivered to one owner, until acknowledged."""

    message_id: str
    rollout_id: str


class RolloutQueue:
    """The streams of rollout ids. Every method raises QueueUnavailable when Redis does not answer.

    Args: runner_type: whose rollouts this object delivers; those of processes and containers are in one stream;
        reclaim_seconds: how long a delivery may stay unacknowledged before another owner gets it; answer_seconds:
        time-out of a command beyond its own wait; dead_seconds: see `DEAD_SECONDS`
    """

    def __init__(
        self,
        url: str,
        *,
        runner_type: str = "process",
        reclaim_seconds: float = 30.0,
        answer_seconds: float = ANSWER_SECONDS,
        dead_seconds: float = DEAD_SECONDS,
    ) -> None:
        self._redis = connect(url)
        self._keys = _keys_of(runner_type)
        self._stream = self._keys[0]
        self._answer_seconds = answer_seconds
        self._enqueue = self._redis.register_script(_ENQUEUE)
        self._ack = self._redis.register_script(_ACK)
        self._reclaim_milliseconds = int(reclaim_seconds * 1000)
        self._dead_milliseconds = int(dead_seconds * 1000)
        self._removed_dead_owners = False

    async def enqueue(self, rollout_ids: Sequence[str], runner_type: str = "process") -> int:
        """Makes rollouts of a type deliverable, in order; returns how many are new in the stream. Safe to repeat."""
        added, keys = 0, _keys_of(runner_type)
        async with answering(self._answer_seconds):
            for first in range(0, len(rollout_ids), _BATCH):
                batch = rollout_ids[first : first + _BATCH]
                added += int(await self._enqueue(keys=keys, args=batch))
        return added

    async def deliver(self, owner: str, count: int, block_seconds: float) -> list[Delivery]:
        """Delivers up to `count` rollouts to this owner; none if none arrive within `block_seconds` (at most 10).

        Deliveries that another owner did not acknowledge precede new ones.
        """
        block_milliseconds = max(1, int(min(block_seconds, MAX_BLOCK_SECONDS) * 1000))
        async with answering(self._answer_seconds + 2 * block_milliseconds / 1000):
            try:
                await self._remove_dead_owners()
                return await self._receive(owner, count, block_milliseconds)
            except ResponseError as error:
                # The stream was flushed, before or during the wait.
                if not str(error).startswith(("NOGROUP", "UNBLOCKED")):
                    raise
            await self._create_group()
            return await self._receive(owner, count, block_milliseconds)

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Acknowledges and removes deliveries; the controller enqueues a rollout again if it must run again."""
        if not deliveries:
            return
        arguments = [part for delivery in deliveries for part in (delivery.message_id, delivery.rollout_id)]
        async with answering(self._answer_seconds):
            await self._ack(keys=self._keys, args=[_GROUP, *arguments])

    async def depth(self) -> int:
        """Returns the number of rollouts that wait or are delivered but not acknowledged."""
        async with answering(self._answer_seconds):
            return int(await self._redis.xlen(self._stream))

    async def ping(self) -> None:
        async with answering(self._answer_seconds):
            await self._redis.ping()

    async def close(self) -> None:
        await self._redis.aclose()

    async def _receive(self, owner: str, count: int, block_milliseconds: int) -> list[Delivery]:
        _, unacknowledged, *_ = await self._redis.xautoclaim(
            self._stream, _GROUP, owner, min_idle_time=self._reclaim_milliseconds, count=count
        )
        deliveries = await self._parsed(unacknowledged)
        if deliveries:
            return deliveries
        unread: dict[Any, Any] = {self._stream: ">"}
        fresh: Any = await self._redis.xreadgroup(_GROUP, owner, unread, count=count, block=block_milliseconds)
        if not fresh:
            return []
        [(_, messages)] = fresh.items() if isinstance(fresh, dict) else fresh
        return await self._parsed(messages)

    async def _parsed(self, messages: Any) -> list[Delivery]:
        """Returns the messages with a rollout id; removes all others, which would be delivered for ever."""
        # A message deleted while it was pending has no fields.
        found = [Delivery(message_id, fields.get("rollout", "")) for message_id, fields in messages if fields]
        foreign = [delivery for delivery in found if not _ROLLOUT_ID.fullmatch(delivery.rollout_id)]
        if foreign:
            log.warning("invalid messages removed from the queue", messages=[one.message_id for one in foreign])
            arguments = [part for one in foreign for part in (one.message_id, one.rollout_id)]
            await self._ack(keys=self._keys, args=[_GROUP, *arguments])
        return [delivery for delivery in found if delivery not in foreign]

    async def _remove_dead_owners(self) -> None:
        """Removes consumers of earlier runner processes, once: Redis never removes them itself."""
        if self._removed_dead_owners:
            return
        exists = await self._redis.exists(self._stream)
        owners: Any = await self._redis.xinfo_consumers(self._stream, _GROUP) if exists else []
        for owner in owners:
            if owner["idle"] > self._dead_milliseconds and not owner["pending"]:
                await self._redis.xgroup_delconsumer(self._stream, _GROUP, owner["name"])
        self._removed_dead_owners = True

    async def _create_group(self) -> None:
        try:
            # id="0": rollouts enqueued before the group existed are delivered, too.
            await self._redis.xgroup_create(self._stream, _GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise


def _keys_of(runner_type: str) -> list[str]:
    """The stream, and the hash of what is in it."""
    stream = _STREAM if runner_type in {"process", "container"} else f"{_STREAM}:{runner_type}"
    return [stream, f"{stream}:waiting"]
