"""The queue's promise: every rollout gets exactly one final outcome, even if runners and controllers die."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy import func, select

from leyden.libs.contracts.states import OutcomeKind
from leyden.libs.embedded.servers import EmbeddedRedis
from leyden.libs.queue import leases
from leyden.libs.queue.connection import QueueUnavailable
from leyden.libs.queue.leases import Lease, Outcome
from leyden.libs.queue.stream import RolloutQueue
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from tests.support import builders, queues

ROOT = Path(__file__).parents[3]
SUCCESS = Outcome(OutcomeKind.SUCCEEDED, reward=1.0)

LEASE_AND_WAIT = """
import asyncio, sys
from leyden.libs.store.database import Database
from tests.support.queues import lease_rollout

async def main(dsn, rollout_id):
    async with Database(dsn).session() as session:
        lease = await lease_rollout(session, rollout_id, "doomed", 1.0)
    print(lease.lease_id, flush=True)
    await asyncio.sleep(60)

asyncio.run(main(*sys.argv[1:]))
"""


async def lease(database: Database, rollout_id: str) -> Lease | None:
    async with database.session() as session:
        await queues.control(session)
    async with database.session() as session:
        return await queues.lease_rollout(session, rollout_id, "heir", 60)


async def test_the_lease_of_a_killed_runner_goes_to_the_next_one(database: Database) -> None:
    run = await builders.add_run(database)
    _, [rollout, _] = await builders.add_group(database, run)
    command = [sys.executable, "-c", LEASE_AND_WAIT, database.dsn, rollout.id]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as doomed:
        assert doomed.stdout is not None
        lost_lease_id = doomed.stdout.readline().strip()
        doomed.send_signal(signal.SIGKILL)
    async with asyncio.timeout(60):
        while (inherited := await lease(database, rollout.id)) is None:
            await asyncio.sleep(0.1)
    assert inherited.attempt == 2
    async with database.session() as session:
        assert await leases.heartbeat_all(session, [lost_lease_id, inherited.lease_id], 60) == {inherited.lease_id}
        assert await queues.settle(session, inherited, SUCCESS) is True


async def enqueue_forever(database: Database, queue: RolloutQueue) -> None:
    while True:
        async with database.session() as session:
            await queues.control(session)
        async with database.read() as session:
            waiting = await leases.deliverable_rollouts(session)
        with suppress(QueueUnavailable):
            await queue.enqueue(waiting)
        await asyncio.sleep(0.02)


async def work(database: Database, queue: RolloutQueue, owner: str, dice: random.Random) -> None:
    """A runner that sometimes abandons a lease without settling it, and sometimes settles it as a failure."""
    while True:
        try:
            deliveries = await queue.deliver(owner, 4, 0.05)
        except QueueUnavailable:
            await asyncio.sleep(0.02)
            continue
        if dice.random() < 0.1:
            continue
        async with database.session() as session:
            leased = await leases.lease_rollouts(session, [one.rollout_id for one in deliveries], owner, 60)
        with suppress(QueueUnavailable):
            await queue.ack(deliveries)
        async with database.session() as session:
            for one in leased:
                outcome = SUCCESS if dice.random() > 0.05 else Outcome(OutcomeKind.CANCELLED)
                assert await queues.settle(session, one, outcome) is True


async def final_outcomes(database: Database) -> int:
    async with database.read() as session:
        succeeded = tables.Outcome.kind == OutcomeKind.SUCCEEDED
        return await session.scalar(select(func.count()).where(succeeded)) or 0


async def test_flushing_and_losing_redis_in_the_middle_loses_and_doubles_nothing(
    database: Database, tmp_path: Path
) -> None:
    server = EmbeddedRedis(tmp_path)
    url = server.start()
    run = await builders.add_run(database)
    _, rollouts = await builders.add_group(database, run, size=200)
    queue = RolloutQueue(url, reclaim_seconds=0.1)
    dice, restarted = random.Random(0), False
    loops = [enqueue_forever(database, queue), *(work(database, queue, f"runner-{n}", dice) for n in range(3))]
    tasks = [asyncio.create_task(loop) for loop in loops]
    try:
        async with asyncio.timeout(200), Redis.from_url(url) as client:
            while (done := await final_outcomes(database)) < len(rollouts):
                assert not [task for task in tasks if task.done()]
                with suppress(RedisError):
                    await client.flushall()
                if not restarted and done > len(rollouts) // 2:
                    server.stop()
                    await asyncio.sleep(0.1)
                    server.start()
                    restarted = True
                await asyncio.sleep(0.05)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await queue.close()
        server.stop()
    async with database.read() as session:
        per_rollout = (
            await session.execute(
                select(func.count())
                .where(tables.Outcome.kind == OutcomeKind.SUCCEEDED)
                .group_by(tables.Outcome.rollout_id)
            )
        ).scalars()
        assert list(per_rollout) == [1] * len(rollouts)
        live = tables.Attempt.state.in_(["leased", "running"])
        assert await session.scalar(select(func.count()).where(live)) == 0
