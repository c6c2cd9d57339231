"""Gemini's `generateContent`: configuration, schemas, thoughts, errors; `clients/google-genai.json` has the wire of its
client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.contract.gateway.test_calls import ids
from tests.fakes.chat_model import CHATML_WITH_TOOLS
from tests.fakes.gateway import Scene, attempt_environment, scene

HI: list[Any] = [{"role": "user", "parts": [{"text": "hi"}]}]
TOOLS: list[Any] = [{"functionDeclarations": [{"name": "weather", "parameters": {"type": "OBJECT"}}]}]


async def ask(stage: Scene, action: str = "generateContent", **body: Any) -> httpx.Response:
    """One request, at the address and with the key that the agent's environment has."""
    variables = attempt_environment(stage, stage.gateway.url, "http://nowhere", {})
    headers = {"x-goog-api-key": variables["GEMINI_API_KEY"]}
    async with httpx.AsyncClient(base_url=variables["GOOGLE_GEMINI_BASE_URL"], headers=headers, timeout=30) as http:
        return await http.post(f"/v1beta/models/m:{action}", json={"contents": HI, **body})


async def test_the_configuration_reaches_the_engine_and_the_record_has_unknown_fields(tmp_path, database):
    config = {"temperature": 0.5, "maxOutputTokens": 7, "stop_sequences": ["x", "y"], "seed": 3, "candidateCount": 2}
    schema = {
        "response_mime_type": "application/json",
        "responseSchema": {"type": "ARRAY", "items": {"type": "STRING"}},
    }
    safety, tools = [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}], [{"googleSearch": {}}]
    async with scene(tmp_path, database) as stage:
        answer = (await ask(stage, generationConfig=config, safetySettings=safety, tools=tools)).json()
        assert (await ask(stage, generationConfig=schema)).status_code == 200
        (sent, *_, constrained), (call, *_) = stage.engine.requests, await stage.calls()
    asked = sent["sampling_params"]
    assert [asked[name] for name in ("temperature", "max_new_tokens", "stop")] == [0.5, 7, ["x", "y"]]
    assert json.loads(constrained["sampling_params"]["json_schema"]) == {"type": "array", "items": {"type": "string"}}
    assert call.request == {
        "generationConfig": config, "safetySettings": safety, "model": "m", "stream": False,
        "hosted_tools": ["googleSearch"],
    }  # fmt: skip
    assert (call.dialect, call.trainable) == ("gemini", True)
    first, second = answer["candidates"]
    assert first == {"content": {"role": "model", "parts": [{"text": "Hello."}]}, "index": 0, "finishReason": "STOP"}
    assert (second["index"], answer["modelVersion"]) == (1, "m")
    usage = answer["usageMetadata"]
    assert (usage["promptTokenCount"], usage["totalTokenCount"] - usage["candidatesTokenCount"]) == (
        call.prompt_tokens, call.prompt_tokens
    )  # fmt: skip


async def test_a_stream_without_events_is_one_json_array_and_tokens_are_counted(tmp_path, database):
    async with scene(tmp_path, database, engine={"pace_seconds": 0.001}) as stage:
        config = {"maxOutputTokens": 3, "responseLogprobs": True, "logprobs": 1}
        response = await ask(stage, "streamGenerateContent", generationConfig=config)
        whole = {"model": "models/m", "contents": HI}
        counts = [await ask(stage, "countTokens"), await ask(stage, "countTokens", generateContentRequest=whole)]
        (call,) = await stage.calls()
    assert response.headers["content-type"] == "application/json"
    chunks = [chunk["candidates"][0] for chunk in response.json()]
    assert "".join(chunk["content"]["parts"][0]["text"] for chunk in chunks) == "Hel"
    assert [chunk.get("finishReason") for chunk in chunks] == [*[None] * (len(chunks) - 1), "MAX_TOKENS"]
    chosen = [token for chunk in chunks for token in chunk["logprobsResult"]["chosenCandidates"]]
    assert "".join(token["token"] for token in chosen) == "Hel"
    assert [count.json() for count in counts] == [{"totalTokens": call.prompt_tokens}] * 2


@pytest.mark.parametrize("stream", [False, True])
async def test_thoughts_go_there_and_back_and_broken_arguments_too(tmp_path, database, stream):
    call = '<tool_call>\n{"name": "weather", "arguments": [1]}\n</tool_call>'
    says = [f"<think>\nHm.\n</think>\n\nLet me see.\n{call}", "It rains."]
    asked: Any = {"tools": TOOLS, "generationConfig": {"thinkingConfig": {"includeThoughts": True}}}
    action = "streamGenerateContent" if stream else "generateContent"
    async with scene(tmp_path, database, says=says, template=CHATML_WITH_TOOLS) as stage:
        found = (await ask(stage, action, **asked)).json()
        # Google's client keeps each chunk of a stream as a content of its own.
        contents = [chunk["candidates"][0]["content"] for chunk in (found if stream else [found])]
        parts = [part for content in contents for part in content["parts"]]
        texts = [
            "".join(part["text"] for part in parts if "text" in part and part.get("thought", False) is thought)
            for thought in (True, False)
        ]
        assert texts == ["Hm.", "Let me see."]
        assert parts[-1]["functionCall"]["args"] == {"INVALID_JSON": "[1]"}
        result = {"functionResponse": {"name": "weather", "response": {"error": "wrong"}}}
        await ask(stage, action, **asked, contents=[*HI, *contents, {"role": "user", "parts": [result]}])
        first, last = await stage.calls()
    known = ids(first.prompt_ids) + ids(first.sampled_ids)
    assert ids(last.prompt_ids)[: len(known)] == known
    named = {"name": "weather", "tool_call_id": parts[-1]["functionCall"]["id"], "is_error": True}
    assert last.turns[-1] == {"role": "tool", "content": "wrong", **named}


REFUSED: list[tuple[Any, str]] = [
    ({"contents": []}, "contents"),
    ({"contents": [*HI, {"role": "model", "parts": [{"text": "x"}]}]}, "the last one must be the user's"),
    ({"contents": [{"parts": [{"inlineData": {}}]}]}, "contents.0.parts.0.inlineData: this model reads text"),
    ({"generation_config": {"top_p": 9}}, "generation_config.top_p"),
    ({"tools": [{"functionDeclarations": [{}]}]}, "tools.0.functionDeclarations.0.name"),
    ({"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, "toolConfig.functionCallingConfig needs tools"),
    ({"generationConfig": {"responseJsonSchema": {"type": 5}}}, "is not a valid JSON Schema"),
    ({"cachedContent": "cachedContents/x"}, "cachedContent is not supported"),
]


async def test_a_wrong_body_is_refused_as_google_does(tmp_path, database):
    async with scene(tmp_path, database) as stage:
        for change, message in REFUSED:
            response = await ask(stage, **change)
            error = response.json()["error"]
            assert (response.status_code, message in error["message"]) == (400, True), response.text
            assert (error["code"], error["status"]) == (400, "INVALID_ARGUMENT")
        assert await stage.calls() == []
