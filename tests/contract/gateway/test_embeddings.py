"""Embeddings: made by the server that the run or the settings name or by the bundled model, and recorded as a tool."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from sqlalchemy import select, text

from leyden.libs.contracts.states import EngineState
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.engines import EngineStatus, Pool, write_engines, write_pools
from leyden.services.gateway.embeddings import bundled
from tests.contract.gateway.test_process import client_of, gateway_process
from tests.fakes.gateway import scene
from tests.fakes.sglang_types import embedding_types
from tests.support import builders
from tests.support.shared import free_port, refusing_port
from tests.support.waiting import eventually

POINTS = ("gateway.embedded", "gateway.embedding_recorded")
REPEATED = {"x-stainless-retry-count": "1"}
TEXTS = ["The capital of France is Paris.", "Postgres stores rows on disk.", "Cats are small animals that purr."]


async def spans_of(database: Database) -> Sequence[tables.Span]:
    async with database.read() as session:
        return (await session.scalars(select(tables.Span).order_by(tables.Span.start_ns))).all()


@asynccontextmanager
async def embedder(answer: Callable[[Any], web.Response | None], seen: list[Any]) -> AsyncIterator[str]:
    """The base URL of a server of embeddings. Args: answer: by body; None for a vector of two numbers"""

    async def embed(request: web.Request) -> web.Response:
        body = await request.json()
        seen.append((request.headers.get("authorization"), body))
        item = {"object": "embedding", "index": 0, "embedding": [0.5, -0.25]}
        usage = {"prompt_tokens": 1, "total_tokens": 1}
        return answer(body) or web.json_response({"object": "list", "model": "small", "data": [item], "usage": usage})

    app = web.Application()
    app.router.add_post("/v1/embeddings", embed)
    async with TestServer(app) as server:
        yield str(server.make_url("/v1"))


async def test_a_request_and_its_answer_pass_unchanged_with_another_key(tmp_path, database):
    def answer(body: Any) -> web.Response | None:
        if body["input"] == "wrong":
            return web.json_response({"error": {"message": "no", "type": "invalid_request_error"}}, status=400)
        statuses = {"key": 401, "busy": 429, "broken": 500}
        status = statuses.get(body["input"])
        return web.json_response({"error": {"message": "bad key"}}, status=status) if status else None

    seen: list[Any] = []
    async with (
        embedder(answer, seen) as url,
        scene(tmp_path, database, embeddings_url=f"{url}/", embeddings_api_key="theirs") as stage,
        stage.client() as client,
    ):
        answered = await client.embeddings.create(model="e", input="text", encoding_format="float")
        with pytest.raises(openai.BadRequestError, match="no"):
            await client.embeddings.create(model="e", input="wrong")
        # That key is the gateway's: the agent's own is right.
        with pytest.raises(openai.InternalServerError, match="GATEWAY_EMBEDDINGS_API_KEY"):
            await client.embeddings.create(model="e", input="key")
        for failing in ("busy", "broken"):
            with pytest.raises(openai.InternalServerError, match="no answer"):
                await client.embeddings.create(model="e", input=failing)
        assert await stage.calls() == []
        spans = await spans_of(database)
        deliveries = await eventually(lambda: failed_requests(database, 3))
    assert answered.data[0].embedding == [0.5, -0.25]
    assert seen[0] == ("Bearer theirs", {"model": "e", "input": "text", "encoding_format": "float"})
    # A failure of the platform is no step of the agent, and none of its faults.
    assert [(span.status, span.error_type) for span in spans] == [("ok", None), ("error", "400")]
    assert deliveries


async def failed_requests(database: Database, count: int) -> bool:
    async with database.read() as session:
        found = (await session.scalars(select(tables.Delivery.delivered))).all()
    return found.count(False) == count


async def test_a_run_names_the_provider_and_the_model(tmp_path, database):
    seen: list[Any] = []
    key = tmp_path / "key"
    key.write_text("theirs")
    key.chmod(0o600)
    run = builders.run_document(embeddings={"provider": "embedder", "provider_model": "small"})
    async with embedder(lambda _: None, seen) as url:
        providers = {"embedder": {"url": url, "api_key_file": str(key)}}
        # The run goes before the operator's server.
        settings = {"providers": providers, "embeddings_url": "http://nowhere"}
        async with scene(tmp_path, database, run=run, **settings) as stage, stage.client() as client:
            answer = await client.embeddings.create(model="e", input=[3, 1, 4], encoding_format="float")
            (span,) = await spans_of(database)
        async with scene(tmp_path, database, run=run) as stage, stage.client() as client:
            with pytest.raises(openai.InternalServerError, match="knows no provider 'embedder'"):
                await client.embeddings.create(model="e", input="text")
    assert answer.data[0].embedding == [0.5, -0.25]
    assert seen == [("Bearer theirs", {"model": "small", "input": [3, 1, 4], "encoding_format": "float"})]
    assert span.attributes.pop("leyden.request_sha256")
    assert span.attributes == {
        "gen_ai.operation.name": "embeddings",
        "gen_ai.provider.name": "embedder",
        "gen_ai.request.model": "e",
        "gen_ai.response.model": "small",
        "gen_ai.embeddings.dimension.count": 2,
        "gen_ai.usage.input_tokens": 1,
        "leyden.embeddings.inputs": 1,
        "leyden.embeddings.texts": [],
    }


async def test_a_server_that_answers_no_vectors_is_named_in_each_form(tmp_path, database):
    def answer(_: Any) -> web.Response:
        return web.json_response({"object": "list", "data": []})

    models = "v1beta/models/gemini-embedding-001"
    async with (
        embedder(answer, []) as url,
        httpx.AsyncClient() as http,
        scene(tmp_path, database, embeddings_url=url) as stage,
    ):
        address = f"{stage.gateway.url}/r/{stage.rollout_id}/1"
        headers = {"authorization": f"Bearer {stage.gateway.key(stage.rollout_id)}"}
        ollama = await http.post(f"{address}/api/embed", json={"model": "m", "input": "a"}, headers=headers)
        one = {"content": {"parts": [{"text": "a"}]}}
        google = await http.post(f"{address}/{models}:embedContent", json=one, headers=headers)
    assert (ollama.status_code, google.status_code) == (503, 503)
    reason = "The server of embeddings gave no vectors in OpenAI's form (data: List should have at least 1 item"
    assert ollama.json()["error"].startswith(reason)
    assert google.json()["error"]["message"].startswith(reason)


@pytest.mark.parametrize("encoding", ["float", "base64"])
async def test_an_sglang_with_an_embedding_model_is_a_provider_and_each_request_a_span(tmp_path, database, encoding):
    types, vectors, seen = embedding_types(), [[0.5, -0.25], [1.0, 0.0]], list[Any]()

    def answer(body: Any) -> web.Response:
        # By the types of `sglang serve --is-embedding`, which names its model by a path.
        asked = types["EmbeddingRequest"].model_validate(body)
        written = [base64.b64encode(np.array(one, "<f4").tobytes()).decode() for one in vectors]
        given = vectors if asked.encoding_format == "float" else written
        made = [{"embedding": one, "index": number} for number, one in enumerate(given[: len(asked.input)])]
        document = {"data": made, "model": "/models/e", "usage": {"prompt_tokens": 7, "total_tokens": 7}}
        return web.json_response(types["EmbeddingResponse"].model_validate(document).model_dump())

    run = builders.run_document(embeddings={"provider": "sglang"})
    key = tmp_path / "key"
    key.write_text("theirs")
    key.chmod(0o600)
    async with embedder(answer, seen) as url:
        providers = {"sglang": {"url": url, "api_key_file": str(key)}}
        async with scene(tmp_path, database, run=run, providers=providers) as stage, stage.client() as client:
            # Without a format the SDK asks for base64.
            asked: Any = {"encoding_format": encoding} if encoding == "float" else {}
            said = await client.embeddings.create(model="e", input=["a", "b"], **asked)
            (span,) = await spans_of(database)
            assert await stage.calls() == []
    assert [one.embedding for one in said.data] == vectors
    assert [(authorization, body["encoding_format"]) for authorization, body in seen] == [("Bearer theirs", encoding)]
    assert (span.kind, span.tool, span.status) == ("tool", "embeddings", "ok")
    told = {"gen_ai.provider.name": "sglang", "gen_ai.embeddings.dimension.count": 2, "gen_ai.usage.input_tokens": 7}
    assert told.items() <= span.attributes.items()


async def test_ollamas_and_googles_clients_embed_and_read_errors_in_their_form(tmp_path, database):
    def google(text: str, **more: Any) -> dict[str, Any]:
        # As google-genai 3.6 sends it; ollama 0.6 sends the other bodies.
        return {"content": {"parts": [{"text": text}], "role": "user"}, "model": "models/gemini-embedding-001", **more}

    models = "v1beta/models/gemini-embedding-001"
    async with scene(tmp_path, database) as stage, httpx.AsyncClient() as http:
        address = f"{stage.gateway.url}/r/{stage.rollout_id}/1"
        headers = {"authorization": f"Bearer {stage.gateway.key(stage.rollout_id)}"}

        async def posted(path: str, **body: Any) -> Any:
            answer = await http.post(f"{address}/{path}", json=body, headers=headers)
            return answer.status_code, answer.json()

        async with stage.client() as client:
            said = await client.embeddings.create(model="e", input=TEXTS[:2], encoding_format="float")
        vectors, tokens = [one.embedding for one in said.data], said.usage.prompt_tokens
        ollama = {"model": bundled.MODEL, "embeddings": vectors, "prompt_eval_count": tokens}
        assert await posted("api/embed", model="m", input=TEXTS[:2], truncate=True) == (200, ollama)
        one = await posted("api/embed", model="m", input=TEXTS[0], dimensions=8)
        assert [len(vector) for vector in one[1]["embeddings"]] == [8]
        batch = {"embeddings": [{"values": one} for one in vectors], "usageMetadata": {"promptTokenCount": tokens}}
        assert await posted(f"{models}:batchEmbedContents", requests=[*map(google, TEXTS[:2])]) == (200, batch)
        single = await posted(f"{models}:embedContent", **google(TEXTS[0], outputDimensionality=8))
        assert len(single[1]["embedding"]["values"]) == 8
        empty = "input must not be empty, and neither must any text in it."
        assert await posted("api/embed", model="m", input="") == (400, {"error": empty})
        refused = {"error": {"code": 400, "message": empty, "status": "INVALID_ARGUMENT"}}
        assert await posted(f"{models}:embedContent", **google("")) == (400, refused)
        image = {"inlineData": {"mimeType": "image/png", "data": "AA=="}}
        status, error = await posted(f"{models}:embedContent", content={"parts": [image]})
        assert (status, "send text" in error["error"]["message"]) == (400, True)
        lengths = [google("a", outputDimensionality=8), google("b")]
        status, error = await posted(f"{models}:batchEmbedContents", requests=lengths)
        assert (status, "those of one length at a time" in error["error"]["message"]) == (400, True)
        spans = await spans_of(database)
    assert [one.status for one in spans] == ["ok"] * 5 + ["error"] * 2
    assert [one.attributes["gen_ai.request.model"] for one in spans[1:4:2]] == ["m", "gemini-embedding-001"]


@dataclass
class Embedding:
    """An SGLang of `--is-embedding`, by its own types; with `samples`, one whose model samples text."""

    samples: bool = False
    seen: list[tuple[str, Any]] = field(default_factory=list)

    async def embed(self, request: web.Request) -> web.Response:
        types, body = embedding_types(), await request.json()
        self.seen.append((request.headers.get("authorization"), body))
        asked = types["EmbeddingRequest"].model_validate(body)
        if self.samples or not all(one.strip() for one in asked.input):
            said = (
                "This model does not appear to be an embedding model by default. Please add `--is-embedding` when"
                " launching the server or try another model."
                if self.samples
                else "Input at index 0 cannot be empty or whitespace only"
            )
            error = {"object": "error", "message": said, "type": "BadRequestError", "param": None, "code": 400}
            return web.json_response(error, status=400)
        made = [{"embedding": [0.5, float(number)], "index": number} for number in range(len(asked.input))]
        document = {"data": made, "model": "/models/e", "usage": {"prompt_tokens": 7, "total_tokens": 7}}
        return web.json_response(types["EmbeddingResponse"].model_validate(document).model_dump())

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/v1/embeddings", self.embed)
        async with TestServer(app) as server:
            yield str(server.make_url("")).rstrip("/")


async def write_pool(database: Database, *engines: EngineStatus, embeddings: bool = True) -> None:
    async with database.session() as session:
        await write_pools(session, [Pool("default"), Pool("embedder", "/models/e", embeddings=embeddings)])
        await write_engines(session, engines, "embedder")


IN_POOL = builders.run_document(embeddings={"pool": "embedder"})


async def test_the_engines_of_a_pool_embed_and_get_the_texts_alone(tmp_path, database):
    engine = Embedding()
    key = {"engine_api_key": "theirs"}
    with refusing_port() as port:
        gone = f"http://127.0.0.1:{port}"
    async with (
        engine.running() as url,
        scene(tmp_path, database, run=IN_POOL, **key) as stage,
        stage.client() as client,
    ):
        # One that has died since the controller saw it, and one that the controller knows as silent.
        silent = EngineStatus("http://127.0.0.1:9", EngineState.UNREACHABLE)
        serving = [EngineStatus(one, EngineState.SERVING) for one in (url, gone)]
        await write_pool(database, *serving, silent)
        # An adapter's name, an id and a priority are SGLang's fields and no agent's.
        theirs = {"rid": "another's", "priority": 9, "user": "me"}
        for _ in range(4):
            said = await client.embeddings.create(
                model="all-minilm:latest", input=["a", "b"], dimensions=2, encoding_format="float", extra_body=theirs
            )
        with pytest.raises(openai.BadRequestError, match="cannot be empty or whitespace only"):
            await client.embeddings.create(model="e", input=" ")
        with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False"):
            await client.embeddings.create(model="e", input=[1, 2])
        spans = await spans_of(database)
        assert await stage.calls() == []
    assert [one.embedding for one in said.data] == [[0.5, 0.0], [0.5, 1.0]]
    asked = {"model": "default", "input": ["a", "b"], "encoding_format": "float", "dimensions": 2}
    # The SDK asks for base64 by itself.
    empty = {"model": "default", "input": [" "], "encoding_format": "base64"}
    assert engine.seen == [*[("Bearer theirs", asked)] * 4, ("Bearer theirs", empty)]
    statuses = [(one.kind, one.tool, one.status, one.error_type) for one in spans]
    assert statuses == [
        *[("tool", "embeddings", "ok", None)] * 4,
        ("tool", "embeddings", "error", "engine_refused"),
        ("tool", "embeddings", "error", "unsupported_value"),
    ]
    told = {
        "gen_ai.provider.name": "embedder",
        "gen_ai.request.model": "all-minilm:latest",
        "gen_ai.response.model": "/models/e",
        "gen_ai.embeddings.dimension.count": 2,
        "gen_ai.usage.input_tokens": 7,
        "leyden.embeddings.texts": ["a", "b"],
    }
    assert told.items() <= spans[0].attributes.items()


async def test_a_pool_in_which_nothing_embeds_answers_with_the_remedy(tmp_path, database):
    sampling = Embedding(samples=True)
    async with (
        sampling.running() as url,
        scene(tmp_path, database, run=IN_POOL, engine_api_key="theirs") as stage,
        stage.client() as client,
    ):
        await write_pool(database, embeddings=False)
        with pytest.raises(openai.InternalServerError, match="No pool 'embedder' makes embeddings: add one with"):
            await client.embeddings.create(model="e", input="text")
        for engines in ((), (EngineStatus(url, EngineState.SERVING),)):
            await write_pool(database, *engines)
            with pytest.raises(openai.InternalServerError, match="start SGLang with --is-embedding"):
                await client.embeddings.create(model="e", input="text")
        # A failure of the platform is no step of the agent.
        assert await spans_of(database) == []
    assert sampling.seen


@pytest.mark.parametrize("configured", [False, True])
async def test_without_a_server_the_answer_names_the_remedy(tmp_path, database, configured, monkeypatch):
    monkeypatch.setattr(bundled, "PACKAGE", "no_such_package")
    with refusing_port() as port:
        url = f"http://127.0.0.1:{port}/v1" if configured else None
        async with scene(tmp_path, database, embeddings_url=url) as stage, stage.client() as client:
            with pytest.raises(openai.APIStatusError) as caught:
                await client.embeddings.create(model="e", input="text")
    expected = (404, "GATEWAY_EMBEDDINGS_URL") if not configured else (503, "does not answer")
    assert (caught.value.status_code, expected[1] in caught.value.message) == (expected[0], True)


async def test_the_bundled_model_embeds_where_nobody_names_a_server(tmp_path, database):
    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    async with scene(tmp_path, database) as stage, stage.client() as client:
        # The SDK asks for base64 by itself, and decodes it.
        encoded = await client.embeddings.create(model="e", input=TEXTS, extra_headers={"traceparent": parent})
        written = await client.embeddings.create(model="e", input=TEXTS, encoding_format="float")
        short = await client.embeddings.create(model="e", input=TEXTS[1], dimensions=64)
        raw = await client.embeddings.with_raw_response.create(model="e", input=TEXTS[0], encoding_format="base64")
        question = await client.embeddings.create(model="e", input="How does a database keep records?")
        assert [model.id async for model in client.models.list()] == ["model"]
        assert await stage.calls() == []
        first = (await spans_of(database))[0]
    documents = np.array([item.embedding for item in encoded.data])
    assert [item.index for item in encoded.data] == [0, 1, 2]
    assert (encoded.model, encoded.usage.prompt_tokens) == (bundled.MODEL, encoded.usage.total_tokens)
    np.testing.assert_allclose(np.linalg.norm(documents, axis=1), 1.0, rtol=1e-6)
    np.testing.assert_allclose([item.embedding for item in written.data], documents, rtol=1e-6)
    beginning = documents[1][:64] / np.linalg.norm(documents[1][:64])
    np.testing.assert_allclose(short.data[0].embedding, beginning, atol=1e-6)
    vector = np.frombuffer(base64.b64decode(raw.http_response.json()["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(vector, documents[0], rtol=1e-6)
    assert int(np.argmax(documents @ np.array(question.data[0].embedding))) == 1
    assert (first.kind, first.tool, first.status, first.scope) == ("tool", "embeddings", "ok", "leyden.gateway")
    assert (first.trace_id, first.parent_span_id) == ("a" * 32, "b" * 16)
    assert first.end_ns > first.start_ns
    assert first.attributes["leyden.embeddings.texts"] == TEXTS
    assert first.attributes["gen_ai.embeddings.dimension.count"] == bundled.DIMENSIONS
    assert first.attributes["gen_ai.usage.input_tokens"] == encoded.usage.prompt_tokens


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input": ""}, "must not be empty"),
        ({"input": []}, "must not be empty"),
        ({"input": ["a", ""]}, "must not be empty"),
        ({"input": [1, 2]}, "check_embedding_ctx_length=False"),
        ({"input": [[1], [2]]}, "check_embedding_ctx_length=False"),
        ({"input": {"text": "a"}}, "Invalid value for 'input'"),
        ({"input": ["a"] * 2049}, "more than 2048 texts"),
        ({"input": ["a", "a " * 9000]}, "Input 1 has more than 8192 tokens"),
        ({"input": "a" * 200_000}, "Input 0 has more than 8192 tokens"),
        ({"input": ["a " * 8000] * 40}, "more than 300000 tokens together"),
        ({"dimensions": 257}, "less than or equal to 256"),
        ({"encoding_format": "int8"}, "Invalid value for 'encoding_format'"),
    ],
)
async def test_a_wrong_request_is_refused_as_openai_does_and_recorded(tmp_path, database, changes, words):
    async with scene(tmp_path, database) as stage, stage.client() as client:
        create: Any = client.embeddings.create
        with pytest.raises(openai.BadRequestError) as refused:
            await create(**{"model": "e", "input": "a", **changes})
        (span,) = await spans_of(database)
    assert words in refused.value.message
    assert refused.value.type == "invalid_request_error"
    assert (span.status, span.error_type) == ("error", refused.value.code)


async def test_long_texts_are_cut_in_the_record(tmp_path, database):
    async with scene(tmp_path, database) as stage, stage.client() as client:
        await client.embeddings.create(model="e", input=["a\0b", "c " * 8000, "d " * 8000, "e"])
        await client.embeddings.create(model="e", input=["f"] * 101)
        long, many = await spans_of(database)
    texts = long.attributes["leyden.embeddings.texts"]
    assert (texts[0], list(map(len, texts)), long.attributes["leyden.truncated"]) == ("a\ufffdb", [3, 16000, 381], True)
    assert (len(many.attributes["leyden.embeddings.texts"]), many.attributes["leyden.truncated"]) == (100, True)
    assert (long.attributes["leyden.embeddings.inputs"], many.attributes["leyden.embeddings.inputs"]) == (4, 101)


async def test_embeddings_count_among_the_calls_that_an_attempt_may_store(tmp_path, database):
    async with scene(tmp_path, database, max_attempt_calls=2) as stage, stage.client() as client:
        await client.embeddings.create(model="e", input="a")
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        with pytest.raises(openai.BadRequestError, match="GATEWAY_MAX_ATTEMPT_CALLS"):
            await client.embeddings.create(model="e", input="b")
        with pytest.raises(openai.BadRequestError, match="GATEWAY_MAX_ATTEMPT_CALLS"):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        assert (len(await spans_of(database)), len(await stage.calls())) == (1, 1)


async def test_an_attempt_that_ends_meanwhile_gets_no_answer_and_no_record(tmp_path, database):
    arrived, go = asyncio.Event(), asyncio.Event()

    async def embed(_request: web.Request) -> web.Response:
        arrived.set()
        await go.wait()
        return web.json_response({"object": "list", "model": "e", "data": []})

    app = web.Application()
    app.router.add_post("/v1/embeddings", embed)
    async with TestServer(app) as server:
        url = str(server.make_url("/v1"))
        async with scene(tmp_path, database, embeddings_url=url) as stage, stage.client() as client:
            asking = asyncio.create_task(client.embeddings.create(model="e", input="text"))
            await arrived.wait()
            await builders.end_attempt(database, stage.rollout_id)
            go.set()
            with pytest.raises(openai.PermissionDeniedError):
                await asking
            assert await spans_of(database) == []


@pytest.mark.parametrize("point", POINTS)
async def test_a_killed_gateway_neither_loses_nor_doubles_an_embedding_that_is_asked_for_again(
    tmp_path, database, point
):
    port, faults = free_port(), tmp_path / "faults"
    faults.mkdir()
    (faults / point).touch()
    async with scene(tmp_path, database) as stage, client_of(stage, port, max_retries=0) as client:
        async with gateway_process(stage, port, LEYDEN_FAULTS=str(faults)):
            with pytest.raises(openai.APIConnectionError):
                await client.embeddings.create(model="e", input=TEXTS)
            assert len(await spans_of(database)) == POINTS.index(point)
        async with gateway_process(stage, port):
            # The client would send this by itself, after a wait.
            await client.embeddings.create(model="e", input=TEXTS, extra_headers=REPEATED)
            (span,) = await spans_of(database)
            # Not a repeat: the agent has its answer, and asks again.
            await client.embeddings.create(model="e", input=TEXTS)
            assert len(await spans_of(database)) == 2
    assert span.attributes["leyden.embeddings.texts"] == TEXTS


async def test_a_retry_of_a_request_whose_record_waits_makes_no_second_span(tmp_path, database):
    async with scene(tmp_path, database) as stage, stage.client(timeout=1.0) as client:
        async with database.engine.begin() as connection:
            await connection.execute(text("LOCK TABLE spans IN EXCLUSIVE MODE"))
            with pytest.raises(openai.APITimeoutError):
                await client.embeddings.create(model="e", input=TEXTS)
            options: Any = {"extra_headers": REPEATED, "timeout": 60.0}
            again = asyncio.create_task(client.embeddings.create(model="e", input=TEXTS, **options))
            assert await spans_of(database) == []
        assert len((await again).data) == 3
        assert len(await spans_of(database)) == 1
