"""Ollama's chat: options, formats, thinking, errors; `clients/ollama-python.json` has the wire of its client."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from leyden.services.gateway.calls.context import seed_of_rollout
from tests.contract.gateway.test_calls import ids
from tests.fakes.chat_model import CHATML_WITH_TOOLS
from tests.fakes.gateway import Scene, attempt_environment, scene

HI: list[Any] = [{"role": "user", "content": "hi"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


async def ask(stage: Scene, **body: Any) -> httpx.Response:
    """One request, at the address and with the key that the agent's environment has."""
    variables = attempt_environment(stage, stage.gateway.url, "http://nowhere", {})
    headers = {"authorization": f"Bearer {variables['OLLAMA_API_KEY']}"}
    async with httpx.AsyncClient(base_url=variables["OLLAMA_HOST"], headers=headers, timeout=30) as http:
        return await http.post("/api/chat", json={"model": "m", "messages": HI, **body})


async def test_options_reach_the_engine_and_the_record_has_unknown_ones(tmp_path, database):
    options = {"temperature": 0.5, "num_predict": 7, "stop": ["x", "y"], "seed": 3, "num_ctx": 4096}
    async with scene(tmp_path, database) as stage:
        answer = (await ask(stage, stream=False, options=options, keep_alive="5m", new={"a": 1})).json()
        (call,), (sent,) = await stage.calls(), stage.engine.requests
    asked = sent["sampling_params"]
    assert [asked[name] for name in ("temperature", "max_new_tokens", "stop")] == [0.5, 7, ["x", "y"]]
    assert call.request == {"model": "m", "stream": False, "options": options, "keep_alive": "5m", "new": {"a": 1}}
    assert (call.dialect, call.trainable, asked["sampling_seed"]) == (
        "ollama_chat",
        True,
        seed_of_rollout(3, stage.rollout_id),
    )
    assert (answer["message"], answer["done_reason"]) == ({"role": "assistant", "content": "Hello."}, "stop")
    assert (answer["model"], answer["prompt_eval_count"], answer["eval_count"]) == (
        "m", call.prompt_tokens, call.completion_tokens
    )  # fmt: skip
    assert ids(call.sampled_ids) == stage.engine.sampled[sent["rid"]]


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"temperature": 0}, "temperature"), ({"top_p": 0.9}, "top_p"), ({"top_k": 40}, "top_k")],
)
async def test_options_that_a_trainer_cannot_reproduce_make_a_call_untrainable(tmp_path, database, options, reason):
    async with scene(tmp_path, database) as stage:
        await ask(stage, options=options)
        (call,) = await stage.calls()
    assert (call.trainable, reason in call.untrainable_reason) == (False, True)


async def test_a_stream_is_the_default_and_has_lines_of_json(tmp_path, database):
    async with scene(tmp_path, database, engine={"pace_seconds": 0.001}) as stage:
        response = await ask(stage, options={"num_predict": 3, "num_ctx": 8})
        (call,) = await stage.calls()
    lines = [httpx.Response(200, content=line).json() for line in response.content.splitlines()]
    assert response.headers["content-type"] == "application/x-ndjson"
    assert "".join(line["message"]["content"] for line in lines) == "Hel"
    assert [line["done"] for line in lines] == [*[False] * (len(lines) - 1), True]
    assert (lines[-1]["done_reason"], lines[-1]["eval_count"]) == ("length", call.completion_tokens)


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_goes_there_and_back_and_broken_arguments_too(tmp_path, database, stream):
    call = '<tool_call>\n{"name": "weather", "arguments": [1]}\n</tool_call>'
    says = [f"<think>\nHm.\n</think>\n\nLet me see.\n{call}", "It rains."]
    async with scene(tmp_path, database, says=says, template=CHATML_WITH_TOOLS) as stage:
        response = await ask(stage, think=True, tools=TOOLS, stream=stream)
        parts = [httpx.Response(200, content=line).json()["message"] for line in response.content.splitlines()]
        message: Any = {"role": "assistant", "content": "".join(part["content"] for part in parts)}
        message["thinking"] = "".join(part.get("thinking", "") for part in parts)
        message["tool_calls"] = [call for part in parts for call in part.get("tool_calls", ())]
        assert (message["content"], message["thinking"]) == ("Let me see.", "Hm.")
        assert message["tool_calls"][0]["function"]["arguments"] == {"INVALID_JSON": "[1]"}
        result = {"role": "tool", "tool_name": "weather", "content": "wrong"}
        await ask(stage, think=True, tools=TOOLS, stream=stream, messages=[*HI, message, result])
        first, last = await stage.calls()
    known = ids(first.prompt_ids) + ids(first.sampled_ids)
    assert ids(last.prompt_ids)[: len(known)] == known
    assert last.turns[-1] == {"role": "tool", "content": "wrong", "name": "weather"}


@pytest.mark.parametrize(
    ("form", "schema"),
    [("json", {"type": "object"}), ({"type": "array"}, {"type": "array"}), ("", None)],
    ids=["json", "schema", "none"],
)
async def test_a_format_constrains_what_the_engine_samples(tmp_path, database, form, schema):
    async with scene(tmp_path, database) as stage:
        assert (await ask(stage, format=form, stream=False)).status_code == 200
        (sent,) = stage.engine.requests
    assert ("json_schema" in sent["sampling_params"]) == (schema is not None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": []}, "messages"),
        (
            {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]},
            "messages.0.images: this model reads text",
        ),
        ({"options": {"temperature": 9}}, "options.temperature"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
        ({"format": {"type": 5}}, "format is not a valid JSON Schema"),
    ],
    ids=["messages", "images", "temperature", "tools", "format"],
)
async def test_a_wrong_body_is_refused_as_ollama_does(tmp_path, database, change, message):
    async with scene(tmp_path, database) as stage:
        response = await ask(stage, **change)
        assert (response.status_code, message in response.json()["error"]) == (400, True), response.text
        assert await stage.calls() == []
