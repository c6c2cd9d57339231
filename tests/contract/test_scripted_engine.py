"""The scripted engine of the tests speaks SGLang's protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
import pytest

from tests.fakes.scripted_engine import LETTERS, ScriptedEngine, engine_process, running
from tests.fakes.sglang_types import api_types

SAID = [*LETTERS, 2]


class Client:
    def __init__(self, http: aiohttp.ClientSession) -> None:
        self._http = http

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        async with self._http.post(path, json=body) as response:
            text = await response.read()
            return response.status, orjson.loads(text) if text[:1] == b"{" else text

    async def get(self, path: str) -> Any:
        async with self._http.get(path) as response:
            assert response.status == 200
            return orjson.loads(await response.read() or b"null")

    async def generate(self, rid: str | None = "r", **changes: Any) -> tuple[int, Any]:
        return await self.post("/generate", **request(rid, **changes))

    async def stream(self, rid: str = "r", **changes: Any) -> list[Any]:
        events = []
        async with self._http.post("/generate", json=request(rid, stream=True, **changes)) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    events.append(orjson.loads(line[6:]))
        return events


def request(rid: str | None, **changes: Any) -> dict[str, Any]:
    parameters = {"max_new_tokens": 20, "stop": [], "stop_token_ids": [2]}
    return {
        "rid": rid, "input_ids": [1], "sampling_params": parameters, "stream": False, "top_logprobs_num": 0, **changes
    }  # fmt: skip


@asynccontextmanager
async def client_of(url: str) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(url) as http:
        yield Client(http)


@asynccontextmanager
async def served(**fields: Any) -> AsyncIterator[tuple[ScriptedEngine, Client]]:
    async with running(ScriptedEngine(**fields)) as engine, client_of(engine.url) as client:
        yield engine, client


def checked(documents: Sequence[Any]) -> list[list[int]]:
    """The tokens of each event, which SGLang's own decoder accepts."""
    decoded = [api_types().GenerateResponse.from_json_value(document) for document in documents]
    for event in decoded:
        named = [entry.token_id for entry in event.meta_info.output_token_logprobs]
        assert named == event.output_ids
    return [event.output_ids for event in decoded]


async def test_a_request_without_an_id_gets_one() -> None:
    async with served() as (_, client):
        for missing in (None, ""):
            status, answer = await client.generate(rid=missing)
            assert (status, answer["output_ids"], bool(answer["meta_info"]["id"])) == (200, SAID, True)


async def test_complete_cumulative_and_incremental_answers_are_equal() -> None:
    async with served(weight_version="run-a:0", tokens_per_chunk=4) as (engine, client):
        _, whole = await client.generate(top_logprobs_num=2)
        cumulative = await client.stream()
        engine.is_incremental = True
        incremental = await client.stream()
    assert checked([whole]) == [SAID]
    assert checked(cumulative) == [SAID[:4], SAID[:8], SAID]
    assert checked(incremental) == [SAID[:4], SAID[4:8], SAID[8:]]
    spans = [{"version": "run-a:0", "start": 0, "end": 10}]
    for events in ([whole], cumulative, incremental):
        assert [event["meta_info"].get("weight_versions") for event in events] == [None] * (len(events) - 1) + [spans]
        assert [event["meta_info"]["completion_tokens"] for event in events[-1:]] == [10]
        assert events[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}


async def test_requests_that_sglang_refuses_are_refused() -> None:
    async with served() as (_, client):
        status, answer = await client.generate(sampling_params={"max_tokens": 5})
        assert (status, "max_tokens" in answer["error"]) == (400, True)
        assert (await client.post("/generate", rid="r", input_ids="x"))[0] == 400


async def test_a_paused_engine_lets_requests_wait_and_an_abort_ends_them() -> None:
    async with served() as (engine, client):
        assert (await client.post("/pause_generation", mode="retract"))[0] == 200
        waiting = [asyncio.create_task(client.generate(rid)) for rid in ("a", "b")]
        while len(engine.requests) < 2:
            await asyncio.sleep(0.001)
        assert (await client.generate("a"))[0] == 400
        await client.post("/abort_request", rid="a")
        _, aborted = await waiting[0]
        assert aborted["meta_info"]["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
        assert checked([aborted]) == [[]]
        assert not waiting[1].done()
        await client.post("/update_weights_from_disk", model_path="/w", weight_version="run-a:1", flush_cache=True)
        await client.post("/continue_generation")
        _, answer = await waiting[1]
    assert answer["meta_info"]["weight_version"] == "run-a:1"
    assert engine.journal == ["pause retract", "update /w run-a:1 flush=True", "continue"]


async def test_a_pause_that_aborts_ends_what_is_under_way_with_its_tokens() -> None:
    go = asyncio.Event()
    async with served(pace=lambda tokens: go.wait() if tokens == 3 else None) as (engine, client):
        asking = asyncio.create_task(client.generate())
        while not engine.requests:
            await asyncio.sleep(0.001)
        await client.post("/pause_generation")
        go.set()
        _, answer = await asking
    assert checked([answer])[0] == SAID[: len(answer["output_ids"])]
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"


async def test_an_engine_dies_in_the_middle_once() -> None:
    async with served(dies_after=3) as (_, client):
        with pytest.raises(aiohttp.ClientError):
            await client.generate()
        assert (await client.generate())[0] == 200


async def test_an_engine_process_is_scripted_over_http() -> None:
    with engine_process(weight_version="run-a:0") as engine:
        async with client_of(engine.url) as client:
            assert (await client.get("/model_info"))["weight_version"] == "run-a:0"
            await client.post(
                "/script", tokens=[5, 2], weight_version="run-a:1", is_incremental=True, delay_seconds=0.1
            )
            assert checked(await client.stream()) == [[5], [2]]
            assert (await client.get("/server_info"))["incremental_streaming_output"] is True
            assert (await client.post("/script", refuses=[503, {"error": "busy"}]))[0] == 200
            assert await client.generate() == (503, {"error": "busy"})
            assert (await client.post("/script", says="x"))[0] == 400
            assert (await client.get("/script"))["journal"] == []
            assert await client.get("/health") is None
            assert (await client.post("/flush_cache"))[0] == 200


async def test_weights_that_cannot_be_loaded_are_refused() -> None:
    async with served(bad_paths={"/bad"}) as (engine, client):
        body = {"weight_version": "run-a:1", "flush_cache": True}
        status, answer = await client.post("/update_weights_from_disk", model_path="/bad", **body)
    assert (status, answer["success"], engine.weight_version) == (400, False, "default")
