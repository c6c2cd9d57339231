"""Feedback on Postgres: each accepted value counts, and a rollout waits for its values until its wait is over."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from pydantic import SecretStr
from sqlalchemy import text, update

from leyden.libs.contracts.api.rollouts import FeedbackRequest
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.runs.feedback import FeedbackRefused, UnknownComponent, add_feedback, waiting_reasons
from leyden.libs.store.runs.grading import GradingLease, lease_gradings
from leyden.services.api.app import create_app
from leyden.services.api.settings import Settings
from tests.contract.grader.test_worker import F1, add_ungraded, grading, gradings, rewards, settled
from tests.support import builders

THUMBS = {"name": "thumbs", "from": "feedback"}
STARS = {"name": "stars", "from": "feedback", "combine": "last"}
WAIT = {"wait": {"seconds": 600.0}}
TWO = {"seconds": 600.0, "values": 2}

# The clock stands still while the test has the lock: between the snapshot of a statement and its row locks.
HELD_CLOCK = """
    CREATE SCHEMA held;
    CREATE FUNCTION held.clock_timestamp() RETURNS timestamptz LANGUAGE plpgsql AS $$
    BEGIN
        PERFORM pg_advisory_xact_lock_shared(1);
        RETURN pg_catalog.clock_timestamp();
    END $$
"""
HELD_BACKENDS = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"


async def give(database: Database, rollout: tables.Rollout, **changed: Any) -> bool:
    """Returns whether the value is new."""
    request = FeedbackRequest(**{"key": "thumbs 1", "component": "thumbs", "value": 1.0, **changed})
    async with database.session() as session:
        return (await add_feedback(session, rollout.id, request, "ann"))[1]


async def rate(database: Database, rollout: tables.Rollout, value: float, component: str = "thumbs") -> bool:
    """As `give`, with a key for each value."""
    return await give(database, rollout, key=f"{component} {value:g}", component=component, value=value)


async def test_a_value_that_comes_while_a_grader_leases_is_refused_or_counts(database: Database) -> None:
    _, [rollout] = await add_ungraded(database, THUMBS, outputs=[""], **WAIT)

    async def lease_by_a_held_clock() -> list[GradingLease]:
        async with database.session() as session:
            await session.execute(text("SET LOCAL search_path = held, public, pg_catalog"))
            return await lease_gradings(session, "test", 9, 30.0)

    async with database.engine.connect() as holder:
        for statement in (*HELD_CLOCK.split(";\n", 1), "SELECT pg_advisory_lock(1)"):
            await holder.execute(text(statement))
            await holder.commit()
        leasing = asyncio.create_task(lease_by_a_held_clock())
        async with asyncio.timeout(30):
            while not await holder.scalar(text(HELD_BACKENDS)):
                await asyncio.sleep(0.01)
        assert await rate(database, rollout, 0.5)
        await holder.execute(text("SELECT pg_advisory_unlock(1)"))
        (leased,) = await leasing
    assert leased.feedback == {"thumbs": [0.5]}


@pytest.mark.parametrize(("combine", "value"), [("mean", 0.25), ("last", 0.0)])
async def test_a_rollout_is_graded_when_each_of_its_components_has_a_value(
    database: Database, redis_url: str, combine: str, value: float
) -> None:
    components = [F1, {**THUMBS, "combine": combine}, STARS]
    run, [first, second] = await add_ungraded(
        database, *components, outputs=['{"answer": "Eiffel Tower"}'] * 2, finished_at=datetime.now(tz=UTC), **WAIT
    )
    async with grading(database, redis_url):
        assert await rate(database, first, 0.5)
        assert await rate(database, second, 4.0, "stars")
        await asyncio.sleep(0.5)
        assert await gradings(database, run) == []
        assert await rate(database, first, 0.0)
        assert not await rate(database, first, 0.5)
        assert await rate(database, first, 3.0, "stars")
        (graded,) = await settled(database, run, 1)
    assert (graded.rollout_id, graded.total) == (first.id, pytest.approx(0.9 + value + 3.0))
    found = [(one.component, one.value, one.source) for one in await rewards(database, run)]
    assert found == [("answer", 1.0, "token_f1"), ("thumbs", value, "feedback"), ("stars", 3.0, "feedback")]


async def test_a_rollout_waits_for_as_many_values_as_its_run_asks_for(database: Database, redis_url: str) -> None:
    run, [first, second] = await add_ungraded(
        database, {**THUMBS, "combine": "mean"}, outputs=["", ""], finished_at=datetime.now(tz=UTC), wait=TWO
    )
    async with grading(database, redis_url):
        assert await rate(database, first, 1.0)
        assert await rate(database, second, 1.0)
        await asyncio.sleep(0.5)
        assert await gradings(database, run) == []
        assert await rate(database, first, 0.0)
        (graded,) = await settled(database, run, 1)
        assert (graded.rollout_id, graded.total) == (first.id, 0.5)
        async with database.read() as session:
            assert await waiting_reasons(session) == {run.id: "waiting for thumbs: 1 of 2 rollouts have it"}
        with pytest.raises(FeedbackRefused, match="graded already"):
            await rate(database, first, 0.5)


async def test_after_the_wait_fewer_values_count(database: Database, redis_url: str) -> None:
    run, [rollout] = await add_ungraded(database, THUMBS, outputs=[""], wait=TWO)
    assert await rate(database, rollout, 0.5)
    async with grading(database, redis_url):
        (graded,) = await settled(database, run, 1)
    assert (graded.total, graded.reason) == (0.5, None)


async def test_a_rating_wakes_the_grader(database: Database, redis_url: str) -> None:
    run, [rollout] = await add_ungraded(database, THUMBS, outputs=[""], finished_at=datetime.now(tz=UTC), **WAIT)
    token = "secret-of-tests"
    api = create_app(Settings(database_url=database.dsn, redis_url=redis_url, admin_token=SecretStr(token)))
    async with grading(database, redis_url, poll_seconds=3600.0), api.router.lifespan_context(api):
        transport, headers = httpx.ASGITransport(api), {"authorization": f"Bearer {token}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://api", headers=headers) as client:
            value = {"key": "a", "component": "thumbs", "value": 1.0}
            given = await client.post(f"/v1/rollouts/{rollout.id}/feedback", json=value)
        assert given.status_code == 201, given.text
        (graded,) = await settled(database, run, 1)
    assert graded.total == 1.0


async def test_no_feedback_within_the_wait_is_a_failure_and_no_0(database: Database, redis_url: str) -> None:
    run, [rollout, other] = await add_ungraded(database, THUMBS, outputs=["", ""], **WAIT)
    assert await rate(database, other, 1.0)
    async with grading(database, redis_url):
        missed, given = await settled(database, run, 2)
    assert (missed.total, missed.reason) == (None, "thumbs: no feedback within 600 s")
    assert (given.total, given.reason) == (1.0, None)
    with pytest.raises(FeedbackRefused, match="graded already"):
        await rate(database, rollout, 1.0)
    assert not await rate(database, other, 1.0)


async def test_a_key_has_one_body_and_a_component_must_exist(database: Database) -> None:
    run, [rollout] = await add_ungraded(database, F1, THUMBS, STARS, outputs=[""], **WAIT)
    assert await rate(database, rollout, 1.0)
    for changed in ({"value": 0.5}, {"component": "stars"}, {"comment": "no"}):
        with pytest.raises(FeedbackRefused, match="'thumbs 1' was used for other feedback"):
            await give(database, rollout, **changed)
    for name in ("answer", "thumb"):
        with pytest.raises(UnknownComponent, match=f"has no feedback '{name}': write one of thumbs, stars"):
            await rate(database, rollout, 1.0, name)
    async with database.session() as session:
        await session.execute(update(tables.Run).where(tables.Run.id == run.id).values(intent="cancelled"))
    assert not await rate(database, rollout, 1.0)
    with pytest.raises(FeedbackRefused, match="is cancelled, so feedback for its rollouts counts nowhere"):
        await rate(database, rollout, 0.5)


async def test_only_an_attempt_that_may_be_graded_takes_feedback(database: Database) -> None:
    config = builders.run_document(reward={"components": [THUMBS], **WAIT})
    run = await builders.add_run(database, config=config)
    _, [new, running, lost, crashed, ended] = await builders.add_group(database, run, size=5)
    for one, state in ((running, "running"), (lost, "expired"), (crashed, "settled")):
        await builders.add_attempt(database, one, state=state)
    await builders.add_outcome(database, crashed, kind="timeout", reward=None)
    await builders.finish_rollout(database, ended)
    assert await rate(database, running, 1.0)
    refusals = [(new, "it has not begun"), (lost, r"attempt 1 does not count \(lost\)"), (crashed, r"\(timeout\)")]
    for one, words in [*refusals, (ended, "it is finished")]:
        with pytest.raises(FeedbackRefused, match=words):
            await rate(database, one, 1.0)


async def test_a_value_of_a_lost_attempt_is_not_taken_for_one_of_the_next(database: Database) -> None:
    _, [rollout] = await add_ungraded(database, THUMBS, outputs=[""], **WAIT)
    assert await give(database, rollout)
    assert not await give(database, rollout)
    async with database.session() as session:
        (await session.get_one(tables.Rollout, rollout.id)).excused_attempt = 1
    await builders.add_attempt(database, rollout, number=2, state="running")
    with pytest.raises(FeedbackRefused, match="was for attempt 1, which was lost"):
        await give(database, rollout)
    assert await give(database, rollout, key="thumbs 2")
