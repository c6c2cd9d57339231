"""The waits of a request before it has a call are the platform's, whatever its client makes of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import openai
import psycopg
import pytest
from sqlalchemy import update

from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.records.deliveries import NewDelivery
from leyden.libs.store.runs.rollouts import AttemptFacts, ended_attempts
from leyden.services.gateway.records.deliveries import Deliveries
from tests.contract.gateway.test_deliveries import deliveries, ended, give_up, leave
from tests.contract.gateway.test_trouble import HI
from tests.fakes.gateway import Scene, scene
from tests.faults.proxy import FaultProxy, Trouble
from tests.support import builders
from tests.support.waiting import eventually

ROW = NewDelivery("run", "c1", "run.0.0", 1, "", 1, b"")


@asynccontextmanager
async def locked(dsn: str, table: str) -> AsyncIterator[None]:
    """Nobody can read the table inside the block."""
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        await connection.execute(f"LOCK TABLE {table}")  # type: ignore[arg-type]
        yield
        await connection.rollback()


async def judged(stage: Scene, *, seconds: float = 10.0, **outcome: Any) -> AttemptFacts:
    """The facts of the attempt, which has ended, as the controller reads them once it may judge."""
    await builders.add_outcome(stage.database, stage.rollout, **outcome)
    async with stage.database.session() as session:
        now = datetime.now(UTC)
        times = {"started_at": now - timedelta(seconds=seconds), "finished_at": now, "state": "settled"}
        await session.execute(
            update(tables.Attempt).where(tables.Attempt.rollout_id == stage.rollout_id).values(**times)
        )

    async def facts() -> list[AttemptFacts]:
        async with stage.database.read() as session:
            return await ended_attempts(session)

    (found,) = await eventually(facts)
    return found


async def ask(stage: Scene, **options: Any) -> None:
    async with stage.client(**options) as client:
        await client.chat.completions.create(model="m", messages=HI)


async def test_a_client_that_gives_up_before_its_call_exists_has_waited_for_all_of_its_time(tmp_path, database):
    async with scene(tmp_path, database, abandoned_seconds=0.1) as stage:
        async with locked(database.dsn, "model_calls"):
            await give_up(stage, 1.5)
            # Nobody can read yet whether it has a call.
            (row,) = await eventually(lambda: deliveries(database))
            assert (row.seconds, row.delivered) == (None, None)
            await asyncio.sleep(4)
        facts = await judged(stage, kind="agent_error", reward=None)
        (row,) = await ended(database, 1)
        calls = await stage.calls()
    assert (row.delivered, [call.id for call in calls]) == (False, [row.request_id])
    # Not the time that the gateway went on without it.
    assert 1.0 < row.waited_seconds == row.seconds < 5.4
    assert facts.unanswered_seconds == pytest.approx(row.waited_seconds)


async def test_a_client_that_gives_up_while_its_attempt_is_looked_up_has_waited(tmp_path, database):
    async with scene(tmp_path, database, abandoned_seconds=0.1) as stage:
        async with locked(database.dsn, "attempts"):
            await give_up(stage, 1.5)
        facts = await judged(stage, kind="agent_error", reward=None)
    assert facts.unanswered_seconds > 1.0


@pytest.mark.parametrize("table", ["model_calls", "attempts"])
async def test_a_503_without_a_call_is_the_platforms(tmp_path, database, table):
    async with scene(tmp_path, database, record_hold_seconds=0.6, database_answer_seconds=0.5) as stage:
        async with locked(database.dsn, table):
            with pytest.raises(openai.InternalServerError, match="store is down"):
                await ask(stage)
        (row,) = await ended(database, 1)
        facts = await judged(stage, kind="agent_error", reward=None)
        assert await stage.calls() == []
    assert (row.delivered, facts.call_failed) == (False, True)
    assert row.waited_seconds == pytest.approx(row.seconds, abs=0.01)


@pytest.mark.parametrize(("again", "is_failed"), [(HI, False), ([{"role": "user", "content": "else"}], True)])
async def test_a_swallowed_503_excuses_a_reward_unless_a_later_try_is_answered(tmp_path, database, again, is_failed):
    async with scene(tmp_path, database, record_hold_seconds=0.6, database_answer_seconds=0.5) as stage:
        async with locked(database.dsn, "model_calls"):
            with pytest.raises(openai.InternalServerError):
                await ask(stage)
        async with stage.client() as client:
            await client.chat.completions.create(model="m", messages=again)
        facts = await judged(stage, kind="succeeded", reward=0.0)
    assert facts.call_failed is is_failed


async def test_a_refusal_at_once_for_want_of_room_is_the_platforms(tmp_path, database):
    async with scene(tmp_path, database, max_bytes_in_flight=1024) as stage:
        async with stage.client() as client:
            with pytest.raises(openai.InternalServerError, match="as many requests"):
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a" * 2000}])
        facts = await judged(stage, kind="agent_error", reward=None)
    assert facts.call_failed


@pytest.mark.parametrize("messages", [[], HI])
async def test_a_refusal_of_what_the_agent_asked_for_excuses_nothing(tmp_path, database, messages):
    async with scene(tmp_path, database) as stage:
        async with stage.client() as client:
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(model="m", messages=messages, n=1000)
        facts = await judged(stage, kind="agent_error", reward=None)
        assert await deliveries(database) == []
    assert not facts.call_failed


async def test_an_answer_that_is_lost_twice_is_not_sampled_again(tmp_path, database):
    go = asyncio.Event()
    async with scene(tmp_path, database, engine={"pace": lambda _: go.wait()}) as stage, stage.client() as client:
        await leave(stage)
        go.set()
        await eventually(lambda: stage.calls())
        # The repeat looks for the stored answer, and its client leaves before it is found.
        async with locked(database.dsn, "model_calls"):
            with pytest.raises(openai.APITimeoutError):
                await ask(stage, timeout=1.5)
        await asyncio.sleep(1)
        answer = await client.chat.completions.create(model="m", messages=HI)
        (call,) = await stage.calls()
        assert answer.id == f"chatcmpl-{call.id}"
        # This one has arrived: an equal request is one of its own.
        assert (await client.chat.completions.create(model="m", messages=HI)).id != answer.id


async def test_a_repeat_that_joins_the_call_of_its_first_try_lost_nothing(tmp_path, database):
    async with scene(tmp_path, database) as stage:
        asking = asyncio.create_task(ask(stage, timeout=1.0, max_retries=5))
        async with locked(database.dsn, "model_calls"):
            await eventually(lambda: _count(database, 3))
        await asking
        rows = await ended(database, len(await deliveries(database)))
        facts = await judged(stage, kind="succeeded", reward=0.0)
        (call,) = await stage.calls()
    assert {row.request_id: row.delivered for row in rows}[call.request_id] is True
    assert {row.delivered for row in rows if row.request_id != call.request_id} == {None}
    assert (facts.call_failed, facts.lost_seconds, facts.unanswered_seconds) == (False, 0, 0)
    assert facts.waited_seconds > 1.0


async def _count(database: Database, least: int) -> Sequence[tables.Delivery]:
    rows = await deliveries(database)
    return rows if len(rows) >= least else []


async def test_a_body_that_comes_slowly_is_no_wait_for_the_platform(tmp_path, database):
    async with scene(tmp_path, database) as stage:

        async def body() -> AsyncIterator[bytes]:
            yield b'{"model": "m", '
            await asyncio.sleep(3.0)
            assert await deliveries(database) == []
            yield b'"messages": [{"role": "user", "content": "hi"}]}'

        headers = {"authorization": f"Bearer {stage.gateway.key(stage.rollout_id)}"}
        async with httpx.AsyncClient(timeout=60, headers=headers) as http:
            url = f"{stage.gateway.base_url(stage.rollout_id)}/chat/completions"
            assert (await http.post(url, content=body())).status_code == 200
        (row,) = await ended(database, 1)
        (call,) = await stage.calls()
    assert row.waited_seconds < 3.0
    assert call.total_seconds < 3.0


async def test_a_slow_refusal_of_a_request_without_a_call_is_the_platforms(tmp_path, database):
    """Some clients list the models first."""
    async with scene(tmp_path, database, record_hold_seconds=0.6, database_answer_seconds=0.5) as stage:
        async with locked(database.dsn, "attempts"), stage.client() as client:
            with pytest.raises(openai.InternalServerError):
                await client.models.list()
        facts = await judged(stage, kind="agent_error", reward=None)
    assert facts.call_failed


async def test_rows_wait_for_a_store_that_is_away_for_long(tmp_path, database):
    with FaultProxy.of(database.dsn) as proxy:
        behind = {"database_url": proxy.url(database.dsn), "record_hold_seconds": 0.5, "database_answer_seconds": 0.5}
        async with scene(tmp_path, database) as stage, stage.another_gateway(**behind) as gateway:
            proxy.trouble = Trouble(refuse=True)
            async with gateway.client(stage.rollout_id) as client:
                with pytest.raises(openai.InternalServerError, match="store is down"):
                    await client.chat.completions.create(model="m", messages=HI)
            # Longer than any call waits for its record.
            await asyncio.sleep(1.0)
            assert await deliveries(database) == []
            proxy.heal()
            (row,) = await ended(database, 1)
            facts = await judged(stage, kind="agent_error", reward=None)
    assert (row.delivered, facts.call_failed) == (False, True)


async def test_a_gateway_that_stops_does_not_wait_for_ever_for_a_store_that_is_away(database, monkeypatch):
    monkeypatch.setattr("leyden.services.gateway.records.deliveries.DRAIN_SECONDS", 0.2)
    with FaultProxy.of(database.dsn) as proxy:
        behind = Database(proxy.url(database.dsn))
        watching = Deliveries(behind)
        running = asyncio.create_task(watching.run())
        proxy.trouble = Trouble(refuse=True)
        watching.end_early(watching.watch(ROW, 0.0), delivered=False)
        await watching.drain()
        running.cancel()
        await asyncio.wait({running})
        await behind.close()
    assert await deliveries(database) == []
