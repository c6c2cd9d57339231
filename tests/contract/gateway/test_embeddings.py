"""Embeddings: passed on where the settings name a server, else refused with the remedy."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.fakes.gateway import scene
from tests.support import builders
from tests.support.shared import refusing_port


async def test_a_request_and_its_answer_pass_unchanged_with_another_key(tmp_path, database):
    seen: list[Any] = []

    async def embed(request: web.Request) -> web.Response:
        seen.append((request.headers["authorization"], await request.json()))
        if seen[-1][1]["input"] == "wrong":
            return web.json_response({"error": {"message": "no", "type": "invalid_request_error"}}, status=400)
        if seen[-1][1]["input"] == "key":
            return web.json_response({"error": {"message": "bad key"}}, status=401)
        item = {"object": "embedding", "index": 0, "embedding": [0.5, -0.25]}
        return web.json_response(
            {"object": "list", "model": "e", "data": [item], "usage": {"prompt_tokens": 1, "total_tokens": 1}}
        )

    app = web.Application()
    app.router.add_post("/v1/embeddings", embed)
    async with TestServer(app) as server:
        url = str(server.make_url("/v1/"))
        async with (
            scene(tmp_path, database, embeddings_url=url, embeddings_api_key="theirs") as stage,
            stage.client() as client,
        ):
            answer = await client.embeddings.create(model="e", input="text", encoding_format="float")
            with pytest.raises(openai.BadRequestError, match="no"):
                await client.embeddings.create(model="e", input="wrong")
            # That key is the gateway's: the agent's own is right.
            with pytest.raises(openai.InternalServerError, match="GATEWAY_EMBEDDINGS_API_KEY"):
                await client.embeddings.create(model="e", input="key")
            assert await stage.calls() == []
    assert answer.data[0].embedding == [0.5, -0.25]
    assert seen[0] == ("Bearer theirs", {"model": "e", "input": "text", "encoding_format": "float"})


async def test_a_run_names_the_provider_and_the_model(tmp_path, database):
    seen: list[Any] = []

    async def embed(request: web.Request) -> web.Response:
        seen.append((request.headers["authorization"], await request.json()))
        item = {"object": "embedding", "index": 0, "embedding": [0.5]}
        return web.json_response({"object": "list", "model": "small", "data": [item], "usage": {}})

    key = tmp_path / "key"
    key.write_text("theirs")
    key.chmod(0o600)
    run = builders.run_document(embeddings={"provider": "embedder", "provider_model": "small"})
    app = web.Application()
    app.router.add_post("/v1/embeddings", embed)
    async with TestServer(app) as server:
        providers = {"embedder": {"url": str(server.make_url("/v1")), "api_key_file": str(key)}}
        # The run goes before the operator's server.
        settings = {"providers": providers, "embeddings_url": "http://nowhere"}
        async with scene(tmp_path, database, run=run, **settings) as stage, stage.client() as client:
            answer = await client.embeddings.create(model="e", input="text", encoding_format="float")
        async with scene(tmp_path, database, run=run) as stage, stage.client() as client:
            with pytest.raises(openai.InternalServerError, match="knows no provider 'embedder'"):
                await client.embeddings.create(model="e", input="text")
    assert answer.data[0].embedding == [0.5]
    assert seen == [("Bearer theirs", {"model": "small", "input": "text", "encoding_format": "float"})]


@pytest.mark.parametrize("configured", [False, True])
async def test_without_a_server_the_answer_names_the_remedy(tmp_path, database, configured):
    with refusing_port() as port:
        url = f"http://127.0.0.1:{port}/v1" if configured else None
        async with scene(tmp_path, database, embeddings_url=url) as stage, stage.client() as client:
            with pytest.raises(openai.APIStatusError) as caught:
                await client.embeddings.create(model="e", input="text")
    expected = (404, "GATEWAY_EMBEDDINGS_URL") if not configured else (503, "does not answer")
    assert (caught.value.status_code, expected[1] in caught.value.message) == (expected[0], True)
