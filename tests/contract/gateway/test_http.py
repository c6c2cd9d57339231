"""Forms of HTTP that clients use: compressed bodies, trailing slashes, whole numbers with a point, HTTP/1.0."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import orjson
import pytest

from tests.fakes.gateway import Scene, scene
from tests.support import builders
from tests.support.waiting import eventually

QUESTION: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def http_of(stage: Scene) -> httpx.AsyncClient:
    gateway = stage.gateway
    headers = {"authorization": f"Bearer {gateway.key(stage.rollout_id)}"}
    return httpx.AsyncClient(base_url=gateway.base_url(stage.rollout_id), headers=headers, trust_env=False)


@pytest.mark.parametrize("path", ["/chat/completions", "/chat/completions/"])
async def test_a_compressed_body_and_a_trailing_slash_are_taken(tmp_path, database, path):
    async with scene(tmp_path, database) as stage, http_of(stage) as http:
        body = gzip.compress(orjson.dumps(QUESTION | {"max_tokens": 20.0}))
        answer = await http.post(path, content=body, headers={"content-encoding": "gzip"})
        assert answer.status_code == 200, answer.text
        assert stage.engine.requests[0]["sampling_params"]["max_new_tokens"] == 20


@pytest.mark.parametrize(
    ("content", "encoding", "status", "code"),
    [
        (b"no gzip", "gzip", 400, "invalid_body"),
        (gzip.compress(b"{}", mtime=0)[:-4], "gzip", 400, "invalid_body"),
        (gzip.compress(b" " * 2**25), "gzip", 413, "body_too_large"),
        (b"{}", "zstd", 415, "invalid_body"),
    ],
)
async def test_a_body_that_does_not_decompress_is_refused_in_openais_shape(
    tmp_path, database, content, encoding, status, code
):
    async with scene(tmp_path, database) as stage, http_of(stage) as http:
        answer = await http.post("/chat/completions", content=content, headers={"content-encoding": encoding})
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


async def test_models_are_listed_with_and_without_a_slash(tmp_path, database):
    async with scene(tmp_path, database) as stage, http_of(stage) as http:
        assert (await http.get("/models/")).json() == (await http.get("/models")).json()
        assert (await http.get("/models/a/b/")).json()["id"] == "a/b"


async def test_an_error_names_the_callers_fields_and_no_type_of_ours(tmp_path, database):
    async with scene(tmp_path, database) as stage, http_of(stage) as http:
        for change, param in (
            ({"stop": 5}, "stop"),
            ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
            ({"response_format": 5}, "response_format"),
            ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
        ):
            error = (await http.post("/chat/completions", json=QUESTION | change)).json()["error"]
            assert error["param"] == param
            assert "_" not in error["message"].replace("response_format", "")


async def test_a_client_of_http_1_0_gets_a_stream_without_chunks(tmp_path, database):
    async with scene(tmp_path, database) as stage:
        url = urlsplit(stage.gateway.base_url(stage.rollout_id))
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        body = orjson.dumps(QUESTION | {"stream": True})
        head = (
            f"POST {url.path}/chat/completions HTTP/1.0\r\nhost: {url.netloc}\r\ncontent-length: {len(body)}\r\n"
            "content-type: application/json\r\n"
            f"authorization: Bearer {stage.gateway.key(stage.rollout_id)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        answer, _, events = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert b"transfer-encoding" not in answer.lower()
        assert events.startswith(b"data: {") and events.endswith(b"data: [DONE]\n\n")


@asynccontextmanager
async def unfinished(stage: Scene, rollout_id: str, size: int) -> AsyncIterator[asyncio.StreamReader]:
    """A request that lacks the last byte of its body."""
    url = urlsplit(stage.gateway.base_url(rollout_id))
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    head = (
        f"POST {url.path}/chat/completions HTTP/1.1\r\nhost: {url.netloc}\r\ncontent-length: {size + 1}\r\n"
        f"authorization: Bearer {stage.gateway.key(rollout_id)}\r\n\r\n"
    )
    try:
        writer.write(head.encode() + b" " * size)
        yield reader
    finally:
        writer.close()


async def test_slow_bodies_of_an_attempt_leave_room_for_those_of_others(tmp_path, database):
    async with (
        scene(tmp_path, database, max_bytes_in_flight=8000, max_body_bytes=2000) as stage,
        AsyncExitStack() as stack,
    ):
        sibling = f"{stage.run_id}.0.1"
        readers = [await stack.enter_async_context(unfinished(stage, sibling, 1000)) for _ in range(8)]
        # Six of them have no room in the attempt's quarter.
        refusals = [asyncio.create_task(reader.readuntil(b"\r\n\r\n")) for reader in readers]
        done = await eventually(lambda: _done(refusals, 6))
        async with http_of(stage) as http:
            long = QUESTION | {"messages": [{"role": "user", "content": "a" * 1000}]}
            answer = await http.post("/chat/completions", json=long)
        assert answer.status_code == 200, answer.text
        assert all(task.result().startswith(b"HTTP/1.1 429 ") and b"retry-after: 1" in task.result() for task in done)
        for task in refusals:
            task.cancel()


async def test_an_ended_attempt_is_refused_before_its_body_is_there(tmp_path, database):
    async with scene(tmp_path, database) as stage:
        await builders.end_attempt(database, stage.rollout_id)
        async with unfinished(stage, stage.rollout_id, 1000) as reader, asyncio.timeout(30):
            assert (await reader.readline()).startswith(b"HTTP/1.1 403 ")


async def _done(tasks: Sequence[asyncio.Task[bytes]], least: int) -> Sequence[asyncio.Task[bytes]]:
    done = [task for task in tasks if task.done()]
    return done if len(done) >= least else []
