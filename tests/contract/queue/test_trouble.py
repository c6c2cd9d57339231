"""The queue while Redis is silent, full, read-only or disconnected: it gets slower, but loses no data."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import redis

from leyden.libs.queue.connection import QueueUnavailable
from leyden.libs.queue.notifications import Notifications, Topic
from leyden.libs.queue.stream import RolloutQueue
from tests.faults.proxy import FaultProxy, Trouble

ROLLOUTS = [f"run-a.0.{sibling}" for sibling in range(3)]
PATIENCE_SECONDS = 60


@pytest.fixture
def proxy(redis_url: str) -> Iterator[FaultProxy]:
    with FaultProxy.of(redis_url) as running:
        yield running


@pytest.fixture
async def queue(proxy: FaultProxy, redis_url: str) -> AsyncIterator[RolloutQueue]:
    made = RolloutQueue(proxy.url(redis_url), answer_seconds=2.0)
    yield made
    await made.close()


@pytest.fixture
async def notifications(proxy: FaultProxy, redis_url: str) -> AsyncIterator[Notifications]:
    made = Notifications(proxy.url(redis_url))
    yield made
    await made.close()


@pytest.fixture
def server(redis_url: str) -> Iterator[redis.Redis]:
    """The server itself, its settings as before afterwards."""
    with redis.Redis.from_url(redis_url) as client:
        yield client
        client.config_set("maxmemory", 0)
        client.replicaof("NO", "ONE")


async def delivered(queue: RolloutQueue) -> list[str]:
    return [delivery.rollout_id for delivery in await queue.deliver("runner", 10, 0.1)]


@pytest.mark.parametrize("trouble", [Trouble(hang=True), Trouble(refuse=True), Trouble(answer=b"!garbage\r\n")])
async def test_a_failing_redis_raises_queue_unavailable_and_recovers(
    queue: RolloutQueue, proxy: FaultProxy, trouble: Trouble
) -> None:
    await queue.enqueue(ROLLOUTS)
    proxy.trouble = trouble
    for asking in (queue.enqueue(ROLLOUTS), queue.deliver("runner", 10, 0.1), queue.ping(), queue.depth()):
        with pytest.raises(QueueUnavailable):
            await asking
    proxy.heal()
    assert await delivered(queue) == ROLLOUTS


async def test_a_full_redis_refuses_new_rollouts_and_delivers_queued_ones(
    queue: RolloutQueue, server: redis.Redis
) -> None:
    await queue.enqueue(ROLLOUTS[:2])
    assert await delivered(queue) == ROLLOUTS[:2]
    server.config_set("maxmemory", 1)
    with pytest.raises(QueueUnavailable, match="used memory > 'maxmemory'"):
        await queue.enqueue(ROLLOUTS)
    assert await delivered(queue) == []
    server.config_set("maxmemory", 0)
    assert await queue.enqueue(ROLLOUTS) == 1


async def test_a_read_only_redis_replica_counts_as_down(queue: RolloutQueue, server: redis.Redis) -> None:
    await queue.enqueue(ROLLOUTS)
    server.replicaof("127.0.0.1", "9")
    for asking in (queue.enqueue(["run-a.1.0"]), queue.deliver("runner", 10, 0.1)):
        with pytest.raises(QueueUnavailable):
            await asking


async def test_with_a_silent_redis_giving_a_hint_and_waiting_for_one_end(
    notifications: Notifications, proxy: FaultProxy
) -> None:
    await notifications.notify(Topic.RUNS)
    assert await notifications.wait(Topic.RUNS, timeout_seconds=PATIENCE_SECONDS)
    proxy.trouble = Trouble(hang=True)
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert not await notifications.wait(Topic.RUNS, timeout_seconds=0.1)
        for _ in range(1000):
            await notifications.notify(Topic.RUNS)
            await notifications.publish_ended(None)


async def test_cancelling_a_task_that_connects_to_redis_ends_it(redis_url: str) -> None:
    for turns in range(40):
        fresh = Notifications(redis_url)
        giving = asyncio.create_task(fresh.notify(Topic.RUNS))
        for _ in range(turns):
            await asyncio.sleep(0)
        if giving.cancel():
            with pytest.raises(asyncio.CancelledError):
                await giving
        await fresh.close()
