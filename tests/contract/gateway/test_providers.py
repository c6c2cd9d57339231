"""A role whose model is another provider's: asked as chat completions, recorded without tokens, never trained."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from aiohttp import web
from aiohttp.typedefs import Handler

from leyden.libs.contracts.conversation import Turn
from leyden.libs.store.database import Database
from leyden.services.gateway.samplers.provider import MAX_ANSWER_BYTES
from tests.fakes.gateway import Scene, scene
from tests.support import builders

HI: list[Any] = [{"role": "user", "content": "hi"}]
CALL = {"id": "call_9", "type": "function", "function": {"name": "search", "arguments": '{"q":1}'}}
RUN = builders.run_document(
    roles=[{"name": "judge", "model": "judge*", "policy": "judge"}, {"name": "other"}],
    policies={"judge": {"provider": "elsewhere", "provider_model": "big-1"}},
)


@asynccontextmanager
async def provider(*answers: tuple[int, dict[str, Any]]) -> AsyncIterator[tuple[str, list[web.Request], list[Any]]]:
    """A server of chat completions: its address, and the requests and bodies that it got."""
    requests: list[web.Request] = []
    bodies: list[Any] = []
    left = list(answers)

    async def answer(request: web.Request) -> web.Response:
        requests.append(request)
        bodies.append(await request.json())
        status, document = left.pop(0) if len(left) > 1 else left[0]
        return web.json_response(document, status=status)

    async with served("/v1/chat/completions", answer) as url:
        yield url, requests, bodies


@asynccontextmanager
async def served(path: str, handler: Handler) -> AsyncIterator[str]:
    """A server of one route: the base URL of its version 1."""
    app = web.Application()
    app.router.add_post(path, handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def completion(content: str | None, **message: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": content, **message}, "finish_reason": "stop"}
    return {"id": "x", "choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}


@asynccontextmanager
async def judged(folder: Path, database: Database, url: str) -> AsyncIterator[Scene]:
    key = folder / "key"
    key.write_text("secret-key\n")
    key.chmod(0o600)
    providers = {"elsewhere": {"url": url, "api_key_file": str(key)}}
    async with scene(folder, database, run=RUN, providers=providers) as stage:
        yield stage


async def test_a_provider_answers_its_role_and_nobody_sampled_the_tokens_of_the_record(
    tmp_path: Path, database: Database
) -> None:
    async with (
        provider((200, completion("Fine.")), (200, completion(None, tool_calls=[CALL]))) as (url, requests, bodies),
        judged(tmp_path, database, url) as stage,
        stage.client() as client,
    ):
        create: Any = client.chat.completions.create
        first = await create(model="judge-1", messages=HI, temperature=0.5, max_tokens=9)
        turns = [*HI, {"role": "assistant", "content": "Fine."}, {"role": "user", "content": "again"}]
        tool = {"type": "function", "function": {"name": "search", "parameters": {}}}
        stream = await create(model="judge-1", messages=turns, tools=[tool], tool_choice="required", stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream if chunk.choices]
        message = await client.responses.create(model="judge-1", input="hi", max_output_tokens=9)
        own = await create(model="m", messages=turns)
        calls = await stage.calls()
    assert (first.choices[0].message.content, first.usage.prompt_tokens, first.usage.completion_tokens) == (
        "Fine.",
        7,
        3,
    )
    assert [call.function.name for delta in deltas for call in delta.tool_calls or ()] == ["search"]
    assert message.output[-1].type == "function_call"
    assert own.choices[0].message.content == "Hello."
    assert bodies[0] == {"model": "big-1", "messages": HI, "temperature": 0.5, "max_tokens": 9}
    assert (bodies[1]["tool_choice"], bodies[1]["tools"], "stream" in bodies[1]) == ("required", [tool], False)
    assert (bodies[2]["messages"], bodies[2]["max_completion_tokens"]) == (HI, 9)
    assert {request.headers["authorization"] for request in requests} == {"Bearer secret-key"}
    assert [(call.role, call.trainable, call.completion_tokens) for call in calls[:3]] == [("judge", False, 0)] * 3
    assert calls[0].answer == {"role": "assistant", "content": "Fine."}
    # As the run's own model would read the prompt and write the answer.
    decode = stage.model.tokenizer.decode
    read = [decode(np.frombuffer(call.prompt_ids, "<i4").tolist()) for call in calls[:2]]
    wrote = [decode(np.frombuffer(call.written_ids, "<i4").tolist()) for call in calls[:2]]
    assert read[0] == stage.model.render((Turn("user", "hi"),), (), {})
    assert f"{read[0]}Fine.<|im_end|>" in read[1]
    assert wrote[0] == "Fine.<|im_end|>"
    assert (wrote[1].endswith("<|im_end|>"), '"name": "search"' in wrote[1]) == (True, True)
    assert (calls[0].sampled_ids, calls[3].written_ids) == (b"", None)
    assert calls[0].untrainable_reason == "the policy of role judge does not train"
    # The provider's answer has no tokens that a prompt of the policy could continue.
    assert (calls[3].trainable, calls[3].parent_call_id, calls[3].role) == (True, None, "other")
    assert "secret-key" not in json.dumps([call.request for call in calls])


async def test_a_providers_temperature_is_the_agents_in_a_greedy_rollout_too(
    tmp_path: Path, database: Database
) -> None:
    async with (
        provider((200, completion("Fine."))) as (url, _, bodies),
        judged(tmp_path, database, url) as stage,
        stage.client(api_key=stage.gateway.key(stage.rollout.id, greedy=True)) as client,
    ):
        await client.chat.completions.create(model="judge-1", messages=HI, temperature=0.9)
        await client.responses.create(model="judge-1", input="hi", temperature=0.8)
        await client.responses.create(model="judge-1", input="hi")
        await client.chat.completions.create(model="other", messages=HI, temperature=0.9)
        calls = await stage.calls()
    # Models that refuse another temperature than theirs would fail every greedy rollout.
    assert [body.get("temperature") for body in bodies] == [0.9, 0.8, None]
    assert [call.temperature for call in calls] == [0.9, 0.8, 1.0, 0.0]


async def test_a_provider_may_know_another_name_of_the_token_limit(tmp_path: Path, database: Database) -> None:
    async with provider((200, completion("Fine."))) as (url, _, bodies):
        providers = {"elsewhere": {"url": url, "max_tokens_name": "max_tokens"}}
        async with scene(tmp_path, database, run=RUN, providers=providers) as stage, stage.client() as client:
            await client.responses.create(model="judge-1", input="hi", max_output_tokens=9)
    assert bodies[0]["max_tokens"] == 9
    assert "max_completion_tokens" not in bodies[0]


@pytest.mark.parametrize(("entry", "sent"), [({}, None), ({"extra_parameters": True}, 40)])
async def test_a_provider_may_take_more_parameters_than_openai(
    tmp_path: Path, database: Database, entry: dict[str, Any], sent: int | None
) -> None:
    async with provider((200, completion("Fine."))) as (url, _, bodies):
        stage_of = scene(tmp_path, database, run=RUN, providers={"elsewhere": {"url": url, **entry}})
        async with stage_of as stage, stage.anthropic() as client:
            await client.messages.create(model="judge-1", messages=HI, max_tokens=9, extra_body={"top_k": 40})
    assert bodies[0].get("top_k") == sent


async def test_a_provider_answers_more_calls_than_a_pool_has_connections(tmp_path: Path, database: Database) -> None:
    everyone = asyncio.Barrier(120)

    async def wait_for_everyone(_: web.Request) -> web.Response:
        await everyone.wait()
        return web.json_response(completion("Fine."))

    async with (
        served("/v1/chat/completions", wait_for_everyone) as url,
        judged(tmp_path, database, url) as stage,
        stage.client(timeout=60) as client,
    ):
        ask: Any = client.chat.completions.create
        answers = await asyncio.gather(*(ask(model="judge-1", messages=HI, seed=n) for n in range(120)))
    assert len(answers) == 120


NO = b'{"error": "no"}'
ACCOUNT = "check its url in GATEWAY_PROVIDERS, provider_model and the account"
HALF = b'{"choices": [{"message": {"content": "half \\ud83d"}}]}'
LISTED = b'{"choices": [{"message": {"content": ["a"]}}]}'
NO_TEXT = b'{"choices": [{"message": {"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}}]}'


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (401, NO, "refuses the gateway's key: check the api_key_file"),
        (429, NO, "answers 429; try again"),
        (500, NO, "answers 500; try again"),
        (402, NO, f"answers 402: {ACCOUNT}"),
        (404, NO, f"answers 404: {ACCOUNT}"),
        (302, NO, "answers 302: check its url"),
        (200, NO, "no chat completion"),
        (200, HALF, "surrogate"),
        (200, LISTED, "content: Input should be a valid string"),
        (200, b'{"choices": []}', "0 choices instead of 1"),
        (200, NO_TEXT, "arguments: Input should be a valid string"),
        (200, b"<html>", "unexpected character"),
        (200, b" " * (MAX_ANSWER_BYTES + 1), "more than 33554432 bytes"),
    ],
)
async def test_a_provider_in_trouble_is_the_platforms_trouble(
    tmp_path: Path, database: Database, status: int, body: bytes, words: str
) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, body=body, content_type="application/json")

    async with (
        served("/v1/chat/completions", answer) as url,
        judged(tmp_path, database, url) as stage,
        stage.client() as client,
    ):
        with pytest.raises(openai.InternalServerError, match=words):
            await client.chat.completions.create(model="judge-1", messages=HI)
        [call] = await stage.calls()
    assert (call.status, call.role) == ("failed", "judge")


async def test_a_request_that_the_provider_refuses_is_the_agents_mistake(tmp_path: Path, database: Database) -> None:
    async with (
        provider((400, {"error": {"message": "temperature must be 1"}})) as (url, _, _),
        judged(tmp_path, database, url) as stage,
        stage.client() as client,
    ):
        with pytest.raises(openai.BadRequestError, match="temperature must be 1"):
            await client.chat.completions.create(model="judge-1", messages=HI, temperature=0.3)
        (call,) = await stage.calls()
    assert (call.status, call.role, call.finish_reason) == ("refused", "judge", None)


async def test_a_provider_gets_no_raw_prompts(tmp_path: Path, database: Database) -> None:
    async with (
        provider((200, completion("Fine."))) as (url, _, bodies),
        judged(tmp_path, database, url) as stage,
        stage.client() as client,
    ):
        with pytest.raises(openai.BadRequestError, match="answers conversations: send chat completions"):
            await client.completions.create(model="judge-1", prompt="hi")
    assert bodies == []


async def test_an_unknown_provider_names_the_setting(tmp_path: Path, database: Database) -> None:
    async with scene(tmp_path, database, run=RUN) as stage, stage.client() as client:
        with pytest.raises(openai.InternalServerError, match=r"no provider 'elsewhere' \(GATEWAY_PROVIDERS names none"):
            await client.chat.completions.create(model="judge-1", messages=HI)
