from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from leyden.libs.embedded.servers import EmbeddedRedis
from leyden.libs.queue.connection import QueueUnavailable
from leyden.libs.queue.stream import RolloutQueue

SOON = 0.01


@pytest.fixture
async def queue(redis_url: str) -> AsyncIterator[RolloutQueue]:
    made = RolloutQueue(redis_url, reclaim_seconds=60)
    yield made
    await made.close()


async def deliver(queue: RolloutQueue, owner: str = "runner-a", count: int = 10, block: float = SOON) -> list[str]:
    return [delivery.rollout_id for delivery in await queue.deliver(owner, count, block)]


async def test_rollouts_are_delivered_once_and_in_order(queue: RolloutQueue) -> None:
    assert await queue.enqueue(["a", "b", "c"]) == 3
    assert await deliver(queue, "runner-a", count=2) == ["a", "b"]
    assert await deliver(queue, "runner-b") == ["c"]
    assert await deliver(queue, "runner-b") == []


async def test_each_type_of_runner_has_a_stream_of_its_own(queue: RolloutQueue, redis_url: str) -> None:
    jobs = RolloutQueue(redis_url, runner_type="kubernetes")
    assert (await queue.enqueue(["a"]), await queue.enqueue(["b", "c"], "kubernetes")) == (1, 2)
    assert (await deliver(queue), await deliver(jobs)) == (["a"], ["b", "c"])
    assert (await deliver(queue, "runner-b"), await jobs.depth()) == ([], 2)
    await jobs.close()


async def test_a_machines_runner_gets_processes_and_containers(queue: RolloutQueue) -> None:
    assert (await queue.enqueue(["a"]), await queue.enqueue(["b"], "container")) == (1, 1)
    assert await deliver(queue) == ["a", "b"]


async def test_enqueueing_again_adds_nothing_until_acknowledged(queue: RolloutQueue) -> None:
    assert await queue.enqueue(["a", "a", "b"]) == 2
    assert await queue.enqueue(["a", "b"]) == 0
    delivered = await queue.deliver("runner-a", 1, SOON)
    assert await queue.enqueue(["a", "b"]) == 0
    await queue.ack(delivered)
    assert await queue.depth() == 1
    assert await queue.enqueue(["a", "b"]) == 1
    assert await deliver(queue) == ["b", "a"]


async def test_acknowledging_twice_does_not_remove_a_later_delivery(queue: RolloutQueue) -> None:
    await queue.enqueue(["a"])
    delivered = await queue.deliver("runner-a", 1, SOON)
    await queue.ack(delivered)
    await queue.enqueue(["a"])
    await queue.ack(delivered)
    assert await queue.enqueue(["a"]) == 0
    assert await deliver(queue) == ["a"]


async def test_the_names_of_dead_owners_are_forgotten_unless_they_hold_something(redis_url: str) -> None:
    before, after = RolloutQueue(redis_url), RolloutQueue(redis_url, dead_seconds=0.02)
    await before.enqueue(["a", "b"])
    assert await deliver(before, "holds", count=1) == ["a"]
    await before.ack(await before.deliver("dead", 1, SOON))
    await asyncio.sleep(0.05)
    assert await deliver(after, "alive") == []
    names = [owner["name"] for owner in await after._redis.xinfo_consumers("{leyden:rollouts}", "runners")]
    # Since 7.2 Redis knows an owner that asked in vain.
    assert set(names) - {"alive"} == {"holds"}
    await before.close()
    await after.close()


async def test_deliveries_of_a_dead_owner_go_to_another(redis_url: str) -> None:
    queue = RolloutQueue(redis_url, reclaim_seconds=0.02)
    await queue.enqueue(["a", "b"])
    assert await deliver(queue, "dead") == ["a", "b"]
    await asyncio.sleep(0.05)
    assert await deliver(queue, "alive") == ["a", "b"]
    await queue.close()


async def test_deliveries_of_a_live_owner_stay_with_it(queue: RolloutQueue) -> None:
    await queue.enqueue(["a"])
    assert await deliver(queue, "runner-a") == ["a"]
    assert await deliver(queue, "runner-b") == []


async def test_a_flush_costs_one_more_enqueue(queue: RolloutQueue, redis_url: str) -> None:
    await queue.enqueue(["a", "b"])
    delivered = await queue.deliver("runner-a", 1, SOON)
    async with Redis.from_url(redis_url) as client:
        await client.flushall()
    await queue.ack(delivered)
    assert await deliver(queue) == []
    assert await queue.enqueue(["a", "b"]) == 2
    assert await deliver(queue) == ["a", "b"]


async def test_a_flush_during_the_wait_is_survived(queue: RolloutQueue, redis_url: str) -> None:
    await deliver(queue)
    waiting = asyncio.create_task(deliver(queue, block=10))
    await asyncio.sleep(0.05)
    async with Redis.from_url(redis_url) as client:
        await client.flushall()
    await queue.enqueue(["a"])
    assert await waiting == ["a"]


async def test_a_lost_stream_is_restored(queue: RolloutQueue, redis_url: str) -> None:
    await queue.enqueue(["a"])
    async with Redis.from_url(redis_url) as client:
        await client.delete("{leyden:rollouts}")
    assert await queue.enqueue(["a"]) == 1
    assert await deliver(queue) == ["a"]


async def test_a_cancelled_wait_leaves_the_queue_usable(queue: RolloutQueue) -> None:
    waiting = asyncio.create_task(deliver(queue, block=10))
    await asyncio.sleep(0.02)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await queue.enqueue(["a"])
    assert await deliver(queue, block=1) == ["a"]


async def test_an_unreachable_redis_raises_queue_unavailable_and_recovers(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    queue = RolloutQueue(server.start())
    try:
        await queue.enqueue(["a"])
        server.stop()
        for call in (queue.enqueue(["b"]), queue.deliver("runner", 1, 1), queue.depth(), queue.ping()):
            with pytest.raises(QueueUnavailable):
                await call
        server.start()
        assert await queue.enqueue(["a", "b"]) == 2
        assert await deliver(queue) == ["a", "b"]
    finally:
        server.stop()
        await queue.close()


async def test_messages_that_name_no_rollout_are_dropped_and_the_others_delivered(
    queue: RolloutQueue, redis_url: str
) -> None:
    await queue.enqueue(["run-a.0.0"])
    garbage: list[dict[str, str | bytes]] = [
        {"nonsense": "x"},
        {"rollout": b"\xff\xfe"},
        {"rollout": "a\0b"},
        {"rollout": ""},
        {"rollout": "x" * 201},
        {b"\xff": "run-a.0.1"},
    ]
    async with Redis.from_url(redis_url) as client:
        for fields in garbage:
            await client.xadd("{leyden:rollouts}", fields)  # type: ignore[arg-type]
    await queue.enqueue(["run-a.0.1"])
    assert await deliver(queue) == ["run-a.0.0", "run-a.0.1"]
    assert await queue.depth() == 2


@pytest.mark.parametrize("key", ["{leyden:rollouts}", "{leyden:rollouts}:waiting"])
async def test_a_key_of_the_wrong_type_is_replaced(queue: RolloutQueue, redis_url: str, key: str) -> None:
    await queue.enqueue(["run-a.0.0"])
    async with Redis.from_url(redis_url) as client:
        await client.delete(key)
        await client.set(key, "somebody's")
    await queue.enqueue(["run-a.0.0"])
    assert "run-a.0.0" in await deliver(queue)
