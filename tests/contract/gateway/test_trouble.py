"""Calls during failures: agents disconnect, engines die, weights change, Postgres is down, and SDKs retry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import psycopg
import pytest
from prometheus_client import REGISTRY
from sqlalchemy import delete, update

from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.records.calls import CallDefaults
from leyden.libs.store.runs.retention import prune_run
from leyden.services.gateway.records.reader import Reader
from tests.fakes.gateway import Scene, scene
from tests.fakes.scripted_engine import ScriptedEngine, logprob_of, running
from tests.support import builders
from tests.support.waiting import eventually

HI: list[Any] = [{"role": "user", "content": "hi"}]


def ids(data: bytes) -> list[int]:
    return np.frombuffer(data, "<i4").tolist()


@asynccontextmanager
async def held_table(dsn: str) -> AsyncIterator[None]:
    """Nobody can write a model call inside the block."""
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        await connection.execute("LOCK TABLE model_calls IN EXCLUSIVE MODE")
        yield
        await connection.rollback()


async def set_engine(database: Database, url: str, **columns: Any) -> None:
    async with database.session() as session:
        await session.execute(delete(tables.Engine).where(tables.Engine.url == url))
        session.add(tables.Engine(url=url, **{"state": "serving", "policy_version": 0, **columns}))


@asynccontextmanager
async def raw_stream(stage: Scene, **body: Any) -> AsyncIterator[httpx.Response]:
    document = {"model": "m", "messages": HI, "stream": True, **body}
    headers = {"authorization": f"Bearer {stage.gateway.key(stage.rollout_id)}"}
    url = f"{stage.gateway.base_url(stage.rollout_id)}/chat/completions"
    async with (
        httpx.AsyncClient(timeout=60) as http,
        http.stream("POST", url, json=document, headers=headers) as response,
    ):
        yield response


@pytest.mark.parametrize("stream", [False, True])
async def test_the_last_byte_waits_for_the_record(tmp_path, database, stream):
    async with scene(tmp_path, database, record_hold_seconds=60) as stage, stage.client() as client:
        create: Any = client.chat.completions.create
        seen: list[Any] = []

        async def ask() -> None:
            answer = await create(model="m", messages=HI, stream=stream)
            if stream:
                seen.extend([chunk async for chunk in answer])
            else:
                seen.append(answer)

        async with held_table(database.dsn):
            asking = asyncio.create_task(ask())
            await eventually(lambda: len(stage.engine.requests) == 1)
            await asyncio.sleep(0.3)
            assert not asking.done()
            assert not any(choice.finish_reason for chunk in seen for choice in chunk.choices)
        await asking
        assert seen[-1].choices[0].finish_reason == "stop"
        assert len(await stage.calls()) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnect_aborts_generation_and_records_the_partial_call(tmp_path, database, stream):
    reached = asyncio.Event()

    async def pace(tokens: int) -> None:
        while tokens == 3 and not stage.engine.aborted:
            reached.set()
            await asyncio.sleep(0.01)

    async with scene(tmp_path, database, says="Hello, world.", engine={"pace": pace}) as stage:
        async with stage.client() as client:
            create: Any = client.chat.completions.create
            asking = asyncio.create_task(_consume(create(model="m", messages=HI, stream=stream)))
            await reached.wait()
            asking.cancel()
            await asyncio.wait({asking})
        await eventually(lambda: _recorded(stage, 1))
        (call,) = await stage.calls()
        text = stage.model.tokenizer.decode(ids(call.sampled_ids))
    assert stage.engine.aborted == [call.id]
    assert (call.status, call.trainable, call.untrainable_reason) == ("aborted", False, "the agent hung up")
    assert (text, call.answer) == ("Hel", None)
    assert len(call.generator_logprobs) == len(call.policy_versions) == 4 * call.completion_tokens == 12


async def test_no_call_starts_while_the_gateway_stops(tmp_path, database):
    async with scene(tmp_path, database) as stage:
        await stage.gateway.stop()
        async with stage.client() as client:
            with pytest.raises(openai.InternalServerError) as refused:
                await client.chat.completions.create(model="m", messages=HI)
        calls = await stage.calls()
    assert (refused.value.status_code, refused.value.code) == (503, "stopping")
    assert refused.value.response.headers["retry-after"] == "1"
    assert (stage.engine.requests, calls) == ([], [])


async def _consume(answer: Awaitable[Any]) -> Any:
    got = await answer
    if hasattr(got, "choices"):
        return got
    return [chunk async for chunk in got]


async def _recorded(stage: Scene, count: int) -> bool:
    return len(await stage.calls()) == count


@pytest.mark.parametrize("stream", [False, True])
async def test_a_repeat_of_an_sdk_is_replayed_and_never_sampled_again(tmp_path, database, stream):
    async with scene(tmp_path, database, says=["first", "second", "third"]) as stage, stage.client() as client:
        create: Any = client.chat.completions.create

        async def ask(retry: int | None) -> tuple[str, str]:
            headers = {} if retry is None else {"x-stainless-retry-count": str(retry)}
            answer = await create(model="m", messages=HI, stream=stream, extra_headers=headers)
            if not stream:
                return answer.id, answer.choices[0].message.content
            chunks = [chunk async for chunk in answer]
            assert chunks[-1].choices[0].finish_reason == "stop"
            return chunks[0].id, "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices)

        first, equal = await ask(None), await ask(None)
        repeats = [await ask(1), await ask(1)]
        assert len(stage.engine.requests) == 2
        again = await ask(2)
        # Three repeats of the same count for two answers: the third is a call of its own.
        fresh = [await ask(2), await ask(2)]
        assert len(stage.engine.requests) == 3
        calls = await stage.calls()
    assert (first[1], equal[1]) == ("first", "second")
    assert sorted(repeats) == sorted([first, equal])
    assert again in repeats
    assert fresh[0] in repeats and fresh[1][1] == "third"
    assert len(calls) == 3


async def test_a_repeat_after_a_restart_is_replayed(tmp_path, database):
    async with scene(tmp_path, database) as stage:
        async with stage.client() as client:
            first = await client.chat.completions.create(model="m", messages=HI, logprobs=True)
        async with stage.another_gateway() as other, other.client(stage.rollout_id) as client:
            headers = {"x-stainless-retry-count": "1"}
            again = await client.chat.completions.create(model="m", messages=HI, logprobs=True, extra_headers=headers)
        assert len(stage.engine.requests) == 1
    assert again == first


def joined() -> float:
    return REGISTRY.get_sample_value("gateway_replays_total", {"source": "in_flight"}) or 0.0


async def test_a_repeat_joins_the_call_that_is_still_running_and_outlives_the_first_try(tmp_path, database):
    go = asyncio.Event()
    async with scene(tmp_path, database, engine={"pace": lambda _: go.wait()}) as stage, stage.client() as client:
        create: Any = client.chat.completions.create
        first = asyncio.create_task(create(model="m", messages=HI))
        await eventually(lambda: len(stage.engine.requests) == 1)
        before = joined()
        second = asyncio.create_task(create(model="m", messages=HI, extra_headers={"x-stainless-retry-count": "1"}))
        await eventually(lambda: joined() == before + 1)
        first.cancel()
        await asyncio.sleep(0.2)
        go.set()
        answer = await second
        (call,) = await stage.calls()
    assert (answer.id, call.status, len(stage.engine.requests)) == (f"chatcmpl-{call.id}", "completed", 1)


async def test_requests_with_one_idempotency_key_are_sampled_once(tmp_path, database):
    async with scene(tmp_path, database, says=["first", "second"]) as stage, stage.client() as client:
        create: Any = client.chat.completions.create
        answers = [
            await create(model="m", messages=HI, extra_headers={"idempotency-key": key}) for key in ("a", "a", "b")
        ]
    assert [answer.choices[0].message.content for answer in answers] == ["first", "first", "second"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_dies_in_the_middle_costs_nothing_but_time(tmp_path, database, stream):
    async with (
        scene(tmp_path, database, says=lambda _: [], engine={"dies_after": 3}) as stage,
        stage.client() as client,
    ):
        text = stage.model.tokenizer.encode("Hello, world.").tolist()
        prompt = len(stage.model.tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"))
        stage.engine.says = lambda body: [*text[len(body["input_ids"]) - prompt :], 259]
        create: Any = client.chat.completions.create
        got = await _consume(create(model="m", messages=HI, stream=stream, max_tokens=50))
        (call,) = await stage.calls()
    shown = _shown(got) if stream else got.choices[0].message.content
    assert shown == "Hello, world."
    budgets = [asked["sampling_params"]["max_new_tokens"] for asked in stage.engine.requests]
    received = 3 if stream else 1
    assert budgets == [50, 50 - received]
    assert (call.status, ids(call.sampled_ids)) == ("completed", [*text, 259])
    expected = [logprob_of(k) for k in (*range(received), *range(14 - received))]
    assert np.frombuffer(call.generator_logprobs, "<f4").tolist() == expected


def _shown(chunks: list[Any]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


async def test_tokens_record_their_own_versions_when_weights_change_in_the_middle(tmp_path, database):
    async with scene(tmp_path, database, says="Hello.") as stage, stage.client() as client:

        def pace(tokens: int) -> None:
            stage.engine.weight_version = f"{stage.run_id}:{4 if tokens < 2 else 5}"

        stage.engine.pace = pace
        answer = await client.chat.completions.create(model="m", messages=HI)
        (call,) = await stage.calls()
    assert ids(call.policy_versions) == [4, 4, 5, 5, 5, 5, 5]
    assert (call.min_policy_version, call.max_policy_version) == (4, 5)
    assert answer.system_fingerprint == f"{stage.run_id}:5"


async def test_an_answer_aborted_by_a_pause_is_continued(tmp_path, database):
    async with scene(tmp_path, database, says=lambda _: [], engine={}) as stage, stage.client() as client:
        text = stage.model.tokenizer.encode("Hello.").tolist()
        prompt = len(stage.model.tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"))
        stage.engine.says = lambda body: [*text[len(body["input_ids"]) - prompt :], 259]

        def pace(tokens: int) -> None:
            if tokens == 2 and len(stage.engine.requests) == 1:
                stage.engine.aborted.append(stage.engine.requests[0]["rid"])

        stage.engine.pace = pace
        answer = await client.chat.completions.create(model="m", messages=HI)
        (call,) = await stage.calls()
    assert answer.choices[0].message.content == "Hello."
    assert [len(asked["input_ids"]) - prompt for asked in stage.engine.requests] == [0, 2]
    assert ids(call.sampled_ids) == [*text, 259]


def held() -> float:
    return REGISTRY.get_sample_value("gateway_held_calls") or 0.0


async def test_a_call_waits_for_an_engine_that_serves_its_run(tmp_path, database):
    async with scene(tmp_path, database, engine_urls=[], hold_seconds=60) as stage, stage.client() as client:
        await set_engine(database, stage.engine.url, run_id="run-other")
        create: Any = client.chat.completions.create
        before = held()
        asking = asyncio.create_task(create(model="m", messages=HI))
        await eventually(lambda: held() == before + 1)
        await asyncio.sleep(0.3)
        assert not asking.done() and stage.engine.requests == []
        await set_engine(database, stage.engine.url, run_id=stage.run_id, state="updating")
        await asyncio.sleep(0.1)
        assert not asking.done()
        await set_engine(database, stage.engine.url, run_id=stage.run_id, policy_version=3)
        answer = await asking
        (call,) = await stage.calls()
    assert answer.choices[0].message.content == "Hello."
    assert call.queued_seconds > 0.3
    assert stage.engine.requests[0]["extra_key"] == f"{stage.run_id}:3"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_no_engine_serves_in_time_may_be_tried_again(tmp_path, database, stream):
    async with scene(tmp_path, database, engine_urls=[], hold_seconds=0.3) as stage, stage.client() as client:
        create: Any = client.chat.completions.create
        with pytest.raises(openai.InternalServerError) as refused:
            await create(model="m", messages=HI, stream=stream)
        (call,) = await stage.calls()
    assert (refused.value.status_code, refused.value.code) == (503, "engine_unavailable")
    assert refused.value.response.headers["retry-after"] == "10"
    assert (call.status, call.trainable, call.completion_tokens) == ("failed", False, 0)


async def test_another_runs_weights_never_answer(tmp_path, database):
    async with scene(tmp_path, database, hold_seconds=0.5) as stage, stage.client() as client:
        stage.engine.weight_version = "run-other:0"
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="m", messages=HI)
        stage.engine.weight_version = "default"
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="m", messages=HI)
        calls = await stage.calls()
    assert [(call.status, call.completion_tokens) for call in calls] == [("failed", 0), ("failed", 0)]


async def test_a_call_continues_on_another_engine_when_its_engine_dies(tmp_path, database):
    async with scene(tmp_path, database) as stage, stage.client() as client:
        await set_engine(database, "http://127.0.0.1:9", run_id=stage.run_id)
        await set_engine(database, stage.engine.url, run_id=stage.run_id)
        create: Any = client.chat.completions.create
        answers = await asyncio.gather(*(create(model="m", messages=HI) for _ in range(4)))
    assert [answer.choices[0].message.content for answer in answers] == ["Hello."] * 4


async def test_a_rollout_stays_on_its_engine(tmp_path, database):
    async with scene(tmp_path, database) as stage:
        other = ScriptedEngine(stage.engine.says, stage.model.tokenizer.decode, stage.engine.weight_version)
        async with running(other):
            for engine in (stage.engine, other):
                await set_engine(database, engine.url, run_id=stage.run_id)
            await call_twice_each(stage, condition=lambda: bool(other.requests))
            stage.engine.requests.clear()
            other.requests.clear()
            await call_twice_each(stage)
    counts = sorted([len(stage.engine.requests), len(other.requests)])
    assert sum(counts) == 24 and all(count % 2 == 0 for count in counts) and counts[0] > 0


async def call_twice_each(stage: Scene, condition: Callable[[], bool] = lambda: True) -> None:
    """Two calls of each of twelve rollouts, again and again until the gateway has seen what a test has set."""
    async with asyncio.timeout(60):
        while True:
            for sibling in range(12):
                async with stage.gateway.client(f"{stage.run_id}.0.{sibling}") as client:
                    for _ in range(2):
                        await client.chat.completions.create(model="m", messages=HI)
            if condition():
                return


@asynccontextmanager
async def database_away(dsn: str) -> AsyncIterator[None]:
    """Nobody can connect to the database, and whoever was connected is not any more."""
    server, _, name = dsn.rpartition("/")
    async with await psycopg.AsyncConnection.connect(f"{server}/postgres", autocommit=True) as connection:
        await connection.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
        try:
            await connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name]
            )
            yield
        finally:
            await connection.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')


async def test_an_answer_waits_while_postgres_is_down_and_is_recorded_once(tmp_path, database):
    go = asyncio.Event()
    paced: dict[str, Any] = {"record_hold_seconds": 60, "engine": {"pace": lambda _: go.wait()}}
    async with scene(tmp_path, database, **paced) as stage, stage.client() as client:
        create: Any = client.chat.completions.create
        asking = asyncio.create_task(create(model="m", messages=HI))
        await eventually(lambda: len(stage.engine.requests) == 1)
        async with database_away(database.dsn):
            go.set()
            await asyncio.sleep(0.4)
            assert not asking.done()
        await asking
        assert len(await stage.calls()) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_whose_record_cannot_be_stored_is_withheld(tmp_path, database, stream):
    go = asyncio.Event()
    paced: dict[str, Any] = {"record_hold_seconds": 2, "engine": {"pace": lambda _: go.wait()}}
    async with scene(tmp_path, database, **paced) as stage, stage.client() as client:
        create: Any = client.chat.completions.create
        asking = asyncio.create_task(_consume(create(model="m", messages=HI, stream=stream)))
        await eventually(lambda: len(stage.engine.requests) == 1)
        async with database_away(database.dsn):
            go.set()
            with pytest.raises(openai.APIError) as refused:
                await asking
        calls = await stage.calls()
    assert refused.value.code == "store_unavailable"
    assert calls == []


async def test_a_request_that_may_be_a_repeat_waits_for_postgres_and_is_not_sampled_again(tmp_path, database):
    """The gateway has just started: the answer to an equal request may have died with its predecessor."""
    async with scene(tmp_path, database) as stage:
        async with stage.client() as client:
            first = await client.chat.completions.create(model="m", messages=HI)
        # Answers count as lost that began a second before the successor's start.
        await asyncio.sleep(2)
        async with stage.another_gateway() as other, other.client(stage.rollout_id) as client:
            async with held_calls(database.dsn):
                asking = asyncio.create_task(client.chat.completions.create(model="m", messages=HI))
                await asyncio.sleep(4)
                assert not asking.done()
            assert (await asking).id == first.id
        assert len(stage.engine.requests) == 1


@asynccontextmanager
async def held_calls(dsn: str) -> AsyncIterator[None]:
    """Nobody can read or write a model call inside the block."""
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        await connection.execute("LOCK TABLE model_calls IN ACCESS EXCLUSIVE MODE")
        yield
        await connection.rollback()


async def add_lines(response: httpx.Response, lines: list[str]) -> None:
    async for line in response.aiter_lines():
        lines += [line] if line else []


async def test_a_waiting_stream_sends_comments_and_its_error_is_an_event(tmp_path, database):
    settings: dict[str, Any] = {"engine_urls": [], "keepalive_after_seconds": 0.1, "keepalive_seconds": 0.1}
    async with scene(tmp_path, database, hold_seconds=3.0, **settings) as stage, raw_stream(stage) as response:
        lines = list[str]()
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
            await add_lines(response, lines)
    assert response.status_code == 200
    assert all(line.startswith(": ") for line in lines[:2])
    assert '"code":"engine_unavailable"' in lines[-1]
    assert not any("[DONE]" in line for line in lines)


async def test_a_call_beyond_the_limit_waits_and_is_recorded_as_failed_after_the_time_out(tmp_path, database):
    go = asyncio.Event()
    held: dict[str, Any] = {"pace": lambda _: go.wait()}
    bounds: dict[str, Any] = {"max_calls": 1, "hold_seconds": 2.0}
    async with scene(tmp_path, database, engine=held, **bounds) as stage, stage.client() as client:
        create: Any = client.chat.completions.create
        first = asyncio.create_task(create(model="m", messages=HI))
        await eventually(lambda: len(stage.engine.requests) == 1)
        with pytest.raises(openai.InternalServerError) as refused:
            await create(model="m", messages=HI)
        waiting = asyncio.create_task(create(model="m", messages=HI))
        go.set()
        await asyncio.gather(first, waiting)
        statuses = sorted(call.status for call in await stage.calls())
    assert refused.value.code == "overloaded"
    assert statuses == ["completed", "completed", "failed"]


async def test_an_attempt_with_too_many_calls_at_once_is_refused_and_its_siblings_are_not(tmp_path, database):
    go = asyncio.Event()
    held: dict[str, Any] = {"pace": lambda _: go.wait()}
    async with scene(tmp_path, database, engine=held, max_calls_per_attempt=1) as stage, stage.client() as client:
        create: Any = client.chat.completions.create
        first = asyncio.create_task(create(model="m", messages=HI))
        await eventually(lambda: len(stage.engine.requests) == 1)
        with pytest.raises(openai.RateLimitError) as refused:
            await create(model="m", messages=HI)
        async with stage.gateway.client(f"{stage.run_id}.0.1") as sibling:
            other = asyncio.create_task(sibling.chat.completions.create(model="m", messages=HI))
            await eventually(lambda: len(stage.engine.requests) == 2)
            go.set()
            await asyncio.gather(first, other)
        again = await create(model="m", messages=HI)
    assert (refused.value.code, refused.value.response.headers["retry-after"]) == ("rate_limit_exceeded", "1")
    assert again.choices


async def test_bodies_that_are_being_read_are_bounded_together(tmp_path, database):
    async with scene(tmp_path, database, max_bytes_in_flight=1024) as stage, stage.client() as client:
        create: Any = client.chat.completions.create
        with pytest.raises(openai.InternalServerError) as refused:
            await create(model="m", messages=[{"role": "user", "content": "x" * 2000}])
        answered = await create(model="m", messages=HI)
    assert (refused.value.status_code, refused.value.code) == (503, "overloaded")
    assert refused.value.response.headers["retry-after"] == "1"
    assert answered.choices


async def test_a_call_of_a_run_without_a_partition_fails_no_other_call(tmp_path, database):
    async with scene(tmp_path, database) as stage, stage.client() as client:
        create: Any = client.chat.completions.create
        gone = await builders.add_run(database)
        _, (rollout, _) = await builders.add_group(database, gone)
        await builders.add_attempt(database, rollout)
        await builders.end_run(database, gone)
        await prune_run(database, gone.id)
        dropped = stage.gateway.run_id = gone.id
        stage.engine.weight_version = f"{dropped}:0"
        async with stage.gateway.client(f"{dropped}.0.0") as other:
            with pytest.raises(openai.InternalServerError) as refused:
                await other.chat.completions.create(model="m", messages=HI)
        stage.engine.weight_version = f"{stage.run_id}:0"
        await create(model="m", messages=HI)
    assert refused.value.code == "record_refused"


@pytest.mark.parametrize(
    "headers",
    [
        [{"idempotency-key": "a"}, {"idempotency-key": "a"}, {"idempotency-key": "a"}],
        [{}, {"x-stainless-retry-count": "1"}, {"x-stainless-retry-count": "2"}],
    ],
    ids=["one key", "an impatient client"],
)
async def test_a_retry_that_arrives_before_its_first_try_has_started_a_call_joins_it(
    tmp_path, database, monkeypatch, headers
):
    go, reading = asyncio.Event(), asyncio.Event()
    read = Reader.defaults

    async def slow(self: Reader, run_id: str) -> CallDefaults:
        reading.set()
        await go.wait()
        return await read(self, run_id)

    monkeypatch.setattr(Reader, "defaults", slow)
    async with scene(tmp_path, database, says=["first", "second", "third"]) as stage, stage.client() as client:
        create: Any = client.chat.completions.create
        asking = []
        for extra in headers:
            asking.append(asyncio.create_task(create(model="m", messages=HI, extra_headers=extra)))
            await reading.wait()
            await asyncio.sleep(0.05)
        go.set()
        answers = await asyncio.gather(*asking)
        calls = await stage.calls()
    assert {answer.id for answer in answers} == {f"chatcmpl-{call.id}" for call in calls}
    assert (len(calls), len(stage.engine.requests)) == (1, 1)


async def test_an_attempt_may_store_so_many_calls_and_no_more(tmp_path, database):
    async with scene(tmp_path, database, max_attempt_calls=3) as stage, stage.client() as agent:
        create = agent.chat.completions.create
        for number in range(3):
            await create(model="m", messages=[{"role": "user", "content": str(number)}])
        with pytest.raises(openai.BadRequestError, match=r"may store 3 calls \(GATEWAY_MAX_ATTEMPT_CALLS") as caught:
            await create(model="m", messages=[{"role": "user", "content": "more"}])
        assert caught.value.code == "attempt_limit"
    assert len(await stage.calls()) == 3


async def test_calls_in_flight_count_for_what_an_attempt_may_store(tmp_path, database):
    gate = asyncio.Event()
    pace = {"pace": lambda _: gate.wait()}
    async with scene(tmp_path, database, max_attempt_calls=4, engine=pace) as stage, stage.client() as agent:
        asked = [
            asyncio.create_task(agent.chat.completions.create(model="m", messages=HI, n=2, seed=number))
            for number in range(4)
        ]
        refused, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        gate.set()
        done = await asyncio.gather(*asked, return_exceptions=True)
        assert refused and sum(isinstance(one, openai.BadRequestError) for one in done) == 2
    assert len(await stage.calls()) == 4


async def test_an_attempt_may_store_so_many_bytes_of_calls_and_of_objects(tmp_path, database):
    limits = {"max_attempt_call_bytes": 2**16, "max_attempt_objects": 4}
    async with scene(tmp_path, database, context_length=2**20, **limits) as stage, stage.client() as agent:
        await agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * 30_000}])
        with pytest.raises(openai.BadRequestError, match="GATEWAY_MAX_ATTEMPT_CALL_BYTES"):
            await agent.chat.completions.create(model="m", messages=HI)
        items: list[Any] = [{"type": "message", "role": "user", "content": "hi"}] * 2
        await agent.conversations.create(items=items)
        with pytest.raises(openai.BadRequestError, match="GATEWAY_MAX_ATTEMPT_OBJECTS"):
            await agent.conversations.create(items=items)


@pytest.mark.parametrize(
    ("document", "field"),
    [(builders.run_document(roles=[{"name": ["no", "name"]}]), "roles.0.name: Input"), (["no object"], "")],
)
async def test_a_document_that_does_not_parse_fails_its_own_calls_with_the_reason(
    tmp_path: Path, database: Database, document: object, field: str
) -> None:
    reason = f"the stored document does not parse: {field}"
    async with scene(tmp_path, database) as stage, stage.client(max_retries=0) as client:
        async with database.session() as session:
            await session.execute(update(tables.Run).where(tables.Run.id == stage.run_id).values(config=document))
        with pytest.raises(openai.InternalServerError, match=reason):
            await client.chat.completions.create(model="m", messages=HI)
