"""Starts and ends of attempts share transactions, and a refused one fails no other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from sqlalchemy import event, select, text

from leyden.libs.contracts.states import OutcomeKind
from leyden.libs.queue import leases
from leyden.libs.queue.leases import Lease, Outcome
from leyden.libs.queue.notifications import Notifications, Topic
from leyden.libs.store import tables
from leyden.libs.store.database import Database, Refused
from leyden.services.runner.attempt_writer import AttemptWriter
from tests.support import builders

SUCCESS = Outcome(OutcomeKind.SUCCEEDED, reward=1.0, exit_code=0)
# Larger than the column, so that Postgres refuses the row.
REFUSED = Outcome(OutcomeKind.SUCCEEDED, exit_code=2**40)


@pytest.fixture
async def notifications(redis_url: str) -> AsyncIterator[Notifications]:
    opened = Notifications(redis_url)
    yield opened
    await opened.close()


@pytest.fixture
async def writer(database: Database, notifications: Notifications) -> AsyncIterator[AttemptWriter]:
    opened = AttemptWriter(database, notifications, hold_seconds=60)
    running = asyncio.create_task(opened.run())
    yield opened
    running.cancel()
    await asyncio.wait([running])


async def leased(database: Database, size: int) -> list[Lease]:
    run = await builders.add_run(database)
    _, rollouts = await builders.add_group(database, run, size=size)
    async with database.session() as session:
        return await leases.lease_rollouts(session, [one.id for one in rollouts], "runner", 60)


async def states(database: Database) -> list[str]:
    async with database.read() as session:
        return list(await session.scalars(select(tables.Attempt.state).order_by(tables.Attempt.rollout_id)))


async def test_what_ends_while_a_transaction_runs_shares_the_next_one(
    database: Database, notifications: Notifications, writer: AttemptWriter
) -> None:
    valid, commits = await leased(database, 20), []
    event.listen(database.engine.sync_engine, "commit", commits.append)
    assert await asyncio.gather(*(writer.start(lease) for lease in valid)) == [True] * 20
    assert await asyncio.gather(*(writer.settle(lease, SUCCESS) for lease in valid)) == [True] * 20
    assert len(commits) == 2
    assert await states(database) == ["settled"] * 20
    assert await notifications.wait(Topic.OUTCOMES, timeout_seconds=10)


async def test_a_lost_lease_fails_no_other_outcome_of_its_batch(database: Database, writer: AttemptWriter) -> None:
    lost, *others = await leased(database, 3)
    assert await writer.settle(lost, SUCCESS) is True
    assert await asyncio.gather(*(writer.settle(lease, SUCCESS) for lease in (lost, *others))) == [False, True, True]


async def test_a_refused_outcome_fails_no_other(database: Database, writer: AttemptWriter) -> None:
    bad, *good = await leased(database, 3)
    answers = await asyncio.gather(
        writer.settle(bad, REFUSED), *(writer.settle(lease, SUCCESS) for lease in good), return_exceptions=True
    )
    assert isinstance(answers[0], Refused)
    assert answers[1:] == [True, True]
    assert await states(database) == ["leased", "settled", "settled"]


async def test_an_outcome_is_written_even_if_its_caller_was_cancelled(
    database: Database, writer: AttemptWriter
) -> None:
    gone, stays = await leased(database, 2)
    waiting = asyncio.create_task(writer.settle(gone, SUCCESS))
    await asyncio.sleep(0)
    waiting.cancel()
    assert await writer.settle(stays, SUCCESS) is True
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    assert await states(database) == ["settled", "settled"]


async def test_starts_and_ends_in_one_transaction_never_lock_out_renewals(
    database: Database, writer: AttemptWriter
) -> None:
    first, second = await leased(database, 2)
    await writer.start(first)
    async with database.session() as session:
        await session.execute(
            select(tables.Attempt).where(tables.Attempt.rollout_id == first.rollout_id).with_for_update()
        )
        renewal = asyncio.create_task(renewed(database, [first, second]))
        await waiting_for_locks(database, 1)
        written = asyncio.gather(writer.start(second), writer.settle(first, SUCCESS))
        await waiting_for_locks(database, 2)
    assert await renewal == {first.lease_id, second.lease_id}
    assert await written == [True, True]


async def renewed(database: Database, valid: list[Lease]) -> set[str]:
    async with database.session() as session:
        return await leases.heartbeat_all(session, [lease.lease_id for lease in valid], 60)


async def waiting_for_locks(database: Database, count: int) -> None:
    blocked = text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    async with asyncio.timeout(60):
        while True:
            # Within one transaction the view stays as it was first read.
            async with database.read() as session:
                if await session.scalar(blocked) == count:
                    return
            await asyncio.sleep(0.02)
