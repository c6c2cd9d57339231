"""The gateway records of each request how long its client waited, and whether it got the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import openai
import pytest
from sqlalchemy import select

from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.services.gateway.routes import UNWATCHED_SECONDS
from tests.contract.gateway.test_trouble import HI, held_table, raw_stream
from tests.fakes.gateway import Scene, scene
from tests.support.waiting import eventually


async def deliveries(database: Database) -> Sequence[tables.Delivery]:
    async with database.read() as session:
        return (await session.scalars(select(tables.Delivery).order_by(tables.Delivery.sequence))).all()


async def ended(database: Database, count: int) -> Sequence[tables.Delivery]:
    """So many rows, once each of them has its end."""
    async with asyncio.timeout(60):
        while True:
            rows = await deliveries(database)
            if len(rows) == count and all(row.seconds is not None for row in rows):
                return rows
            await asyncio.sleep(0.02)


async def delivered(database: Database) -> tables.Delivery:
    """The row of the answer that arrived. A repeat that takes long to join a call has a row of its own, without one."""

    async def found() -> tables.Delivery | None:
        return next((row for row in await deliveries(database) if row.delivered), None)

    return await eventually(found)


async def give_up(stage: Scene, seconds: float, **headers: str) -> None:
    """A client that waits for so long and then closes its connection."""
    url = f"{stage.gateway.base_url(stage.rollout_id)}/chat/completions"
    key = {"authorization": f"Bearer {stage.gateway.key(stage.rollout_id)}"}
    with pytest.raises(httpx.ReadTimeout):
        async with httpx.AsyncClient(timeout=httpx.Timeout(60, read=seconds)) as http:
            await http.post(url, json={"model": "m", "messages": HI}, headers=key | headers)


async def leave(stage: Scene) -> None:
    """A client that closes its connection while the engine answers, once the gateway watches for that."""
    async with stage.client() as client:
        asking = asyncio.create_task(client.chat.completions.create(model="m", messages=HI))
        await eventually(lambda: len(stage.engine.requests) == 1)
        # The gateway's own timer is on this loop, too: it ends first, however slow the machine is.
        await asyncio.sleep(2 * UNWATCHED_SECONDS)
        asking.cancel()
        await asyncio.wait({asking})


async def test_a_request_that_waits_has_a_row_before_its_answer(tmp_path, database):
    go = asyncio.Event()
    async with scene(tmp_path, database, engine={"pace": lambda _: go.wait()}) as stage, stage.client() as client:
        asking = asyncio.create_task(client.chat.completions.create(model="m", messages=HI))
        rows = await eventually(lambda: deliveries(database))
        assert [(row.waited_seconds, row.seconds, row.delivered) for row in rows] == [(None, None, None)]
        go.set()
        await asking
        (row,) = await ended(database, 1)
        (call,) = await stage.calls()
    assert (row.request_id, row.sequence, row.request_sha256) == (call.request_id, call.sequence, call.request_sha256)
    assert (row.delivered, row.rollout_id, row.attempt) == (True, stage.rollout_id, 1)
    assert row.seconds >= row.waited_seconds >= 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_fast_answer_is_marked_as_delivered(tmp_path, database, stream):
    async with scene(tmp_path, database) as stage, stage.client() as client:
        answer: Any = await client.chat.completions.create(model="m", messages=HI, stream=stream)
        if stream:
            assert [chunk async for chunk in answer]
        (row,) = await ended(database, 1)
    assert row.delivered is True
    assert row.waited_seconds < 10


async def test_the_wait_for_the_record_is_the_platforms(tmp_path, database):
    async with scene(tmp_path, database, record_hold_seconds=60) as stage, stage.client() as client:
        async with held_table(database.dsn):
            asking = asyncio.create_task(client.chat.completions.create(model="m", messages=HI))
            await eventually(lambda: len(stage.engine.requests) == 1)
            await asyncio.sleep(0.6)
        await asking
        (row,) = await ended(database, 1)
    assert row.delivered is True
    assert row.waited_seconds >= 0.6


async def test_a_client_that_leaves_before_any_token_has_waited_for_all_of_its_time(tmp_path, database):
    async def pace(_: int) -> None:
        while not stage.engine.aborted:
            await asyncio.sleep(0.01)

    async with scene(tmp_path, database, engine={"pace": pace}, abandoned_seconds=0.1) as stage:
        await give_up(stage, 0.8)
        (row,) = await ended(database, 1)
    assert row.delivered is False
    assert 0.3 < row.waited_seconds == row.seconds < 20.0


@pytest.mark.parametrize("hears", [True, False], ids=["hears the abort", "is deaf"])
async def test_an_engine_that_stops_in_the_middle_of_an_answer_is_waited_for(tmp_path, database, monkeypatch, hears):
    monkeypatch.setattr("leyden.services.gateway.engine.client.ABORT_SECONDS", 0.3)
    go = asyncio.Event()

    async def pace(tokens: int) -> None:
        while tokens and not (go.is_set() or (hears and stage.engine.aborted)):
            await asyncio.sleep(0.01)

    async with scene(tmp_path, database, engine={"pace": pace}, abandoned_seconds=0.1) as stage:
        await give_up(stage, 3.0)
        (row,) = await ended(database, 1)
        go.set()
        (call,) = await stage.calls()
    assert (row.delivered, call.status, call.completion_tokens) == (False, "aborted", 1)
    assert 2.0 < row.waited_seconds <= row.seconds


@pytest.mark.parametrize("stream", [False, True])
async def test_a_pause_of_the_engine_in_the_middle_of_an_answer_is_waited_for(tmp_path, database, stream):
    async def pace(tokens: int) -> None:
        # Long beside a token's time on a busy machine, too.
        await asyncio.sleep(3.0 if tokens == 2 else 0)

    async with scene(tmp_path, database, engine={"pace": pace}) as stage, stage.client() as client:
        # Other answers show how fast this engine is.
        for _ in range(2):
            pause, stage.engine.pace = stage.engine.pace, None
            await client.chat.completions.create(model="m", messages=HI)
            stage.engine.pace = pause
        answer: Any = await client.chat.completions.create(model="m", messages=HI, stream=stream)
        if stream:
            assert [chunk async for chunk in answer]
        *_, row = await ended(database, 3)
    assert row.delivered is True
    assert 1.3 < row.waited_seconds <= row.seconds


@pytest.mark.parametrize("stream", [False, True])
async def test_the_time_from_the_loss_of_an_engine_to_the_next_token_is_waited_for(tmp_path, database, stream):
    def pace(tokens: int) -> None:
        if tokens == 2:
            stage.engine.refuses = (503, {"error": {"message": "loading"}})

    async with scene(tmp_path, database, engine={"pace": pace}) as stage, stage.client() as client:
        stage.engine.dies_after = 3

        async def ask() -> None:
            answer: Any = await client.chat.completions.create(model="m", messages=HI, stream=stream)
            if stream:
                assert [chunk async for chunk in answer]

        asking = asyncio.create_task(ask())
        await eventually(lambda: stage.engine.refuses is not None)
        await asyncio.sleep(0.9)
        stage.engine.pace = stage.engine.refuses = None
        await asking
        (row,) = await ended(database, 1)
    assert row.delivered is True
    assert 0.5 < row.waited_seconds <= row.seconds


@pytest.mark.parametrize("counts_tries", [True, False])
async def test_a_repeat_joins_the_call_that_its_first_try_left(tmp_path, database, counts_tries):
    go = asyncio.Event()
    async with scene(tmp_path, database, engine={"pace": lambda _: go.wait()}) as stage, stage.client() as client:
        await leave(stage)
        headers = {"x-stainless-retry-count": "1"} if counts_tries else {}
        again = asyncio.create_task(client.chat.completions.create(model="m", messages=HI, extra_headers=headers))
        # A slower repeat gets the stored answer, with the same result.
        await asyncio.sleep(0.2)
        go.set()
        answer = await again
        row = await delivered(database)
        (call,) = await stage.calls()
    assert (answer.id, call.status, len(stage.engine.requests)) == (f"chatcmpl-{call.id}", "completed", 1)
    assert row.request_id == call.request_id


async def test_a_client_with_a_short_timeout_gets_a_slow_answer_by_its_retries(tmp_path, database):
    async def pace(tokens: int) -> None:
        await asyncio.sleep(3.0 if tokens == 0 else 0)

    async with scene(tmp_path, database, engine={"pace": pace}) as stage:
        async with stage.client(timeout=1.0, max_retries=4) as client:
            answer = await client.chat.completions.create(model="m", messages=HI)
        await delivered(database)
    assert answer.choices[0].message.content == "Hello."
    assert len(stage.engine.requests) == 1


async def test_an_answer_for_a_client_that_left_at_once_is_not_delivered(tmp_path, database):
    async def pace(tokens: int) -> None:
        await asyncio.sleep(3.0 if tokens == 0 else 0)

    async with scene(tmp_path, database, engine={"pace": pace}, abandoned_seconds=60) as stage:
        async with stage.client() as client:
            asking = asyncio.create_task(client.chat.completions.create(model="m", messages=HI))
            await eventually(lambda: len(stage.engine.requests) == 1)
            asking.cancel()
            await asyncio.wait({asking})
        (call,) = await eventually(lambda: stage.calls())
    # A gateway that stops waits for no repeat.
    (row,) = await ended(database, 1)
    assert (call.status, row.delivered, row.request_id) == ("completed", False, call.request_id)
    # Its client left long before the first token.
    assert row.waited_seconds < 3.0


async def test_an_answer_that_its_client_no_longer_awaits_after_a_slow_commit_is_not_delivered(tmp_path, database):
    async with scene(tmp_path, database, record_hold_seconds=60, abandoned_seconds=1.5) as stage:
        async with held_table(database.dsn):
            await give_up(stage, 3.0)
        (row,) = await ended(database, 1)
        (call,) = await stage.calls()
    assert (call.status, row.delivered) == ("completed", False)
    # The engine may take most of the three seconds on a busy machine.
    assert row.waited_seconds > 0.1


async def test_a_stream_that_its_client_cuts_is_not_delivered(tmp_path, database):
    async def pace(tokens: int) -> None:
        await asyncio.sleep(0.05 if tokens else 0)

    async with scene(
        tmp_path, database, says="Hello, world. " * 3, engine={"pace": pace}, abandoned_seconds=1.5
    ) as stage:
        async with raw_stream(stage) as response:
            read = 0
            async for piece in response.aiter_raw():
                read += len(piece)
                if read >= 200:
                    break
        (row,) = await ended(database, 1)
    assert row.delivered is False


async def test_a_stored_answer_that_a_repeat_gets_counts_as_delivered(tmp_path, database):
    go = asyncio.Event()
    async with scene(tmp_path, database, engine={"pace": lambda _: go.wait()}) as stage, stage.client() as client:
        await leave(stage)
        go.set()
        await eventually(lambda: stage.calls())
        # The controller waits: a repeat may come.
        assert [row.seconds for row in await deliveries(database)] == [None]
        answer = await client.chat.completions.create(model="m", messages=HI)
        await delivered(database)
        (call,) = await stage.calls()
    assert answer.id == f"chatcmpl-{call.id}"


async def test_the_calls_of_an_ended_gateway_are_ended(tmp_path, database):
    async with scene(tmp_path, database, engine={"pace": lambda _: asyncio.sleep(9)}) as stage:
        async with stage.client() as client:
            asking = asyncio.create_task(client.chat.completions.create(model="m", messages=HI))
            await eventually(lambda: len(stage.engine.requests) == 1)
            await stage.gateway.stop()
            with pytest.raises(openai.InternalServerError):
                await asking
        (row,) = await ended(database, 1)
    assert row.delivered is False


async def test_the_controller_waits_for_no_gateway_that_stopped(tmp_path, database):
    async def names() -> list[str]:
        async with database.read() as session:
            return list(await session.scalars(select(tables.Gateway.name)))

    async with scene(tmp_path, database) as stage, stage.client() as client:
        await client.chat.completions.create(model="m", messages=HI)
        await ended(database, 1)
        assert len(await names()) == 1
    assert await names() == []
