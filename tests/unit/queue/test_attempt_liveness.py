"""One poll answers many calls; a notification of an end counts at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest
from redis.asyncio import Redis

from leyden.libs.queue import attempt_liveness as module
from leyden.libs.queue.attempt_liveness import AttemptEnded, AttemptLiveness
from leyden.libs.queue.notifications import Notifications
from leyden.libs.store import tables
from leyden.libs.store.attempts import AttemptKey, running_attempts
from leyden.libs.store.database import Database, ReadSession, StoreAway
from tests.support import builders
from tests.support.waiting import eventually

PATIENCE_SECONDS = 60.0


@dataclass
class Watched:
    """An `AttemptLiveness` that runs, the ends that it reported, and the keys of every poll."""

    liveness: AttemptLiveness
    notifications: Notifications
    ended: list[AttemptKey] = field(default_factory=list)
    polls: list[set[AttemptKey]] = field(default_factory=list)

    async def runs(self, key: AttemptKey) -> bool:
        try:
            await self.liveness.confirm(*key)
        except AttemptEnded:
            return False
        return True


@asynccontextmanager
async def watched(
    database: Database, redis_url: str, monkeypatch: pytest.MonkeyPatch, hold_seconds: float = 0.0
) -> AsyncIterator[Watched]:
    notifications = Notifications(redis_url)
    seen = Watched(
        AttemptLiveness(database, notifications, hold_seconds=hold_seconds, on_end=lambda key: seen.ended.append(key)),
        notifications,
    )

    async def counted(session: ReadSession, keys: set[AttemptKey]) -> set[AttemptKey]:
        seen.polls.append(keys)
        return await running_attempts(session, keys)

    monkeypatch.setattr(module, "running_attempts", counted)
    task = asyncio.create_task(seen.liveness.run())
    try:
        yield seen
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await notifications.close()


async def heard(redis_url: str) -> bool:
    """Whether anybody subscribes to ended attempts."""
    async with Redis.from_url(redis_url) as client:
        return dict(await client.pubsub_numsub("{leyden:notify}:ended"))[b"{leyden:notify}:ended"] > 0


async def attempts(database: Database, count: int) -> list[tables.Rollout]:
    _, rollouts = await builders.add_group(database, await builders.add_run(database), size=count)
    for rollout in rollouts:
        await builders.add_attempt(database, rollout)
    return rollouts


def key_of(rollout: tables.Rollout) -> AttemptKey:
    return AttemptKey(rollout.id, 1)


async def test_calls_of_running_attempts_share_their_polls(database, redis_url, monkeypatch):
    monkeypatch.setattr(module, "CACHE_TTL_SECONDS", 3600.0)
    rollouts = await attempts(database, 8)
    async with watched(database, redis_url, monkeypatch) as seen:
        asked = [seen.runs(key_of(rollout)) for rollout in rollouts for _ in range(50)]
        assert await asyncio.gather(*asked) == [True] * 400
    # The first call wakes the loop, and those that come meanwhile share the next poll.
    assert len(seen.polls) <= 2
    assert set().union(*seen.polls) == {key_of(rollout) for rollout in rollouts}


async def test_a_confirmation_is_renewed_in_the_background(database, redis_url, monkeypatch):
    monkeypatch.setattr(module, "CACHE_TTL_SECONDS", 0.2)
    (rollout,) = await attempts(database, 1)
    async with watched(database, redis_url, monkeypatch) as seen:
        assert await seen.runs(key_of(rollout))
        await eventually(lambda: _true(len(seen.polls) > 5))
        await builders.end_attempt(database, rollout.id)
        await eventually(lambda: _true(seen.ended == [key_of(rollout)]))
        polls = len(seen.polls)
        assert [await seen.runs(key_of(rollout)) for _ in range(3)] == [False] * 3
        # An end is for ever: nobody asks again.
        assert len(seen.polls) == polls


async def _true(condition: bool) -> bool:
    return condition


async def test_a_notified_end_counts_at_once(database, redis_url, monkeypatch):
    monkeypatch.setattr(module, "CACHE_TTL_SECONDS", 3600.0)
    first, second = await attempts(database, 2)
    async with watched(database, redis_url, monkeypatch) as seen:
        await eventually(lambda: heard(redis_url))
        assert await seen.runs(key_of(first))
        assert await seen.runs(key_of(second))
        await builders.end_attempt(database, first.id, state="settled")
        assert await seen.runs(key_of(first))
        # A hint that is not true costs a poll and changes nothing.
        await seen.notifications.publish_ended([key_of(first), key_of(second), AttemptKey("run-other.0.0", 1)])
        await eventually(lambda: _true(seen.ended == [key_of(first)]))
        assert [await seen.runs(key_of(first)), await seen.runs(key_of(second))] == [False, True]
        await builders.end_attempt(database, second.id)
        await seen.notifications.publish_ended(None)
        await eventually(lambda: _true(seen.ended == [key_of(first), key_of(second)]))


async def test_without_redis_an_end_is_seen_when_the_cache_expires(database, monkeypatch, unused_tcp_port):
    monkeypatch.setattr(module, "CACHE_TTL_SECONDS", 0.2)
    (rollout,) = await attempts(database, 1)
    async with watched(database, f"redis://127.0.0.1:{unused_tcp_port}/0", monkeypatch) as seen:
        assert await seen.runs(key_of(rollout))
        await builders.end_attempt(database, rollout.id)
        await eventually(lambda: _true(seen.ended == [key_of(rollout)]))


@pytest.mark.parametrize("how", ["settled", "expired", "rollout", "run", "never"])
async def test_whatever_ends_an_attempt_ends_its_key(database, redis_url, monkeypatch, how):
    (rollout,) = await attempts(database, 1)
    key = key_of(rollout)
    match how:
        case "settled" | "expired":
            await builders.end_attempt(database, rollout.id, state=how)
        case "rollout":
            async with database.session() as session:
                (await session.get_one(tables.Rollout, rollout.id)).state = "cancelled"
        case "run":
            async with database.session() as session:
                (await session.get_one(tables.Run, rollout.run_id)).intent = "cancelled"
        case "never":
            key = AttemptKey(rollout.id, 2)
    async with watched(database, redis_url, monkeypatch) as seen:
        assert not await seen.runs(key)
        assert seen.ended == []


async def test_an_unreachable_store_raises_store_away(database, redis_url, monkeypatch):
    (rollout,) = await attempts(database, 1)
    async with watched(database, redis_url, monkeypatch) as seen:
        with monkeypatch.context() as patch:
            patch.setattr(module, "running_attempts", _away)
            for _ in range(2):
                with pytest.raises(StoreAway):
                    await seen.liveness.confirm(*key_of(rollout))
        assert await seen.runs(key_of(rollout))


async def test_a_call_waits_until_the_store_is_back(database, redis_url, monkeypatch):
    (rollout,) = await attempts(database, 1)
    async with watched(database, redis_url, monkeypatch, hold_seconds=PATIENCE_SECONDS) as seen:
        with monkeypatch.context() as patch:
            patch.setattr(module, "running_attempts", _away)
            asked = asyncio.create_task(seen.runs(key_of(rollout)))
            await asyncio.wait({asked}, timeout=0.6)
            assert not asked.done()
        assert await asked


async def _away(*_: object) -> set[AttemptKey]:
    raise StoreAway("connection refused")


async def test_the_time_is_the_stores_and_not_the_machines(
    database: Database, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = time.time()
    monkeypatch.setattr(time, "time", lambda: right + 86_400)
    async with watched(database, redis_url, monkeypatch) as seen:
        assert seen.liveness.clock.now() == 0.0
        await seen.liveness.start()
        assert 0 <= seen.liveness.clock.now() - right < PATIENCE_SECONDS
