from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from leyden.libs.queue.notifications import Notifications, Topic
from leyden.libs.store.attempts import AttemptKey

LONG = 60.0
SOON = 0.02


@pytest.fixture
async def pair(redis_url: str) -> AsyncIterator[tuple[Notifications, Notifications]]:
    giver, waiter = Notifications(redis_url), Notifications(redis_url)
    yield giver, waiter
    await giver.close()
    await waiter.close()


async def test_a_waiter_wakes_at_a_notification_of_one_of_its_topics(pair: tuple[Notifications, Notifications]) -> None:
    giver, waiter = pair
    waiting = asyncio.create_task(waiter.wait(Topic.RUNS, Topic.GROUPS, timeout_seconds=LONG))
    await asyncio.sleep(SOON)
    await giver.notify(Topic.GROUPS, Topic.SAMPLES)
    assert await waiting is True


async def test_a_notification_before_the_wait_is_received_once(
    pair: tuple[Notifications, Notifications],
) -> None:
    giver, waiter = pair
    await giver.notify(Topic.RUNS)
    await giver.notify(Topic.RUNS)
    assert await waiter.wait(Topic.RUNS, timeout_seconds=LONG) is True
    assert await waiter.wait(Topic.RUNS, timeout_seconds=SOON) is False


async def test_every_waiter_is_woken(pair: tuple[Notifications, Notifications], redis_url: str) -> None:
    giver, waiter = pair
    other = Notifications(redis_url)
    waiting = [asyncio.create_task(one.wait(Topic.VERSIONS, timeout_seconds=LONG)) for one in (waiter, other)]
    await asyncio.sleep(SOON)
    await giver.notify(Topic.VERSIONS)
    assert await asyncio.gather(*waiting) == [True, True]
    await other.close()


async def test_other_topics_do_not_wake(pair: tuple[Notifications, Notifications]) -> None:
    giver, waiter = pair
    await giver.notify(Topic.OUTCOMES)
    assert await waiter.wait(Topic.ENGINES, timeout_seconds=SOON) is False


async def test_a_flush_loses_no_later_hint(pair: tuple[Notifications, Notifications], redis_url: str) -> None:
    giver, waiter = pair
    await giver.notify(Topic.RUNS)
    assert await waiter.wait(Topic.RUNS, timeout_seconds=LONG) is True
    async with Redis.from_url(redis_url) as client:
        await client.flushall()
    waiting = asyncio.create_task(waiter.wait(Topic.RUNS, timeout_seconds=LONG))
    await asyncio.sleep(SOON)
    await giver.notify(Topic.RUNS)
    assert await waiting is True


async def test_a_cancelled_wait_leaves_the_waiter_usable(pair: tuple[Notifications, Notifications]) -> None:
    giver, waiter = pair
    waiting = asyncio.create_task(waiter.wait(Topic.RUNS, timeout_seconds=LONG))
    await asyncio.sleep(SOON)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await giver.notify(Topic.RUNS)
    assert await waiter.wait(Topic.RUNS, timeout_seconds=LONG) is True


@pytest.mark.parametrize(
    "odd", ["", "[", "7", "{}", '["r"]', '[["r"]]', '[["r", "1"]]', '[["r", 1, 2]]', "[" * 100_000]
)
async def test_an_end_that_cannot_be_read_may_be_that_of_any_attempt(
    pair: tuple[Notifications, Notifications], redis_url: str, odd: str
) -> None:
    giver, listener = pair
    ended = listener.ended()
    # That of the subscription.
    heard = [await asyncio.wait_for(anext(ended), LONG)]
    async with Redis.from_url(redis_url) as client:
        await client.publish("{leyden:notify}:ended", odd)
    await giver.publish_ended([AttemptKey("r", 1)])
    heard += [await asyncio.wait_for(anext(ended), LONG) for _ in range(2)]
    assert heard == [None, None, [AttemptKey("r", 1)]]


async def test_without_redis_giving_does_nothing_and_waiting_is_sleeping() -> None:
    notifications = Notifications("redis://127.0.0.1:1/0")
    await notifications.notify(Topic.RUNS)
    assert await notifications.wait(Topic.RUNS, timeout_seconds=SOON) is False
    await notifications.close()
