"""Bodies that no client library sends: each is refused with what is wrong, or served and recorded; nothing between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from libs.store.database import Database
from tests.fakes.gateway import Scene, scene

CHAT: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}
PLAIN = json.dumps(CHAT)


def deep(levels: int) -> str:
    return "[" * levels + "]" * levels


def with_field(name: str, text: str) -> bytes:
    """The plain body with one more field, spelled as given."""
    return f'{PLAIN[:-1]},"{name}":{text}}}'.encode()


def with_arguments(arguments: str) -> bytes:
    """A conversation whose assistant called a tool with these arguments."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]
    return json.dumps({**CHAT, "messages": turns}).encode()


async def post(found: Scene, body: bytes) -> httpx.Response:
    headers = {"authorization": f"Bearer {found.gateway.key(found.rollout_id)}", "content-type": "application/json"}
    async with httpx.AsyncClient(timeout=60) as http:
        url = f"{found.gateway.base_url(found.rollout_id)}/chat/completions"
        return await http.post(url, content=body, headers=headers)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid JSON"),
        (b"null", "must be a JSON object"),
        (PLAIN.encode() + b"x", "not valid JSON"),
        (PLAIN.encode("utf-16"), "not valid JSON"),
        (PLAIN.replace("hi", "\xe9").encode("latin-1"), "not valid JSON"),
        (PLAIN.replace("hi", "\\ud800").encode(), "not valid JSON"),
        (with_field("metadata", deep(100_000)), "not valid JSON: depth limit"),
        (with_field("metadata", deep(300)), "nested deeper than 64 levels: flatten it"),
        (with_field("chat_template_kwargs", f'{{"x":{deep(900)}}}'), "nested deeper than 64 levels"),
        (with_field("temperature", "1e999"), "not valid JSON"),
        (with_field("temperature", "NaN"), "not valid JSON"),
        (with_field("seed", "9" * 400), "number is infinity"),
        (with_field("top_k", "99999999999"), "'top_k': Input should be less than or equal to 1073741824"),
        (with_field("logit_bias", json.dumps({"9" * 5000: 1})), "logit_bias names token '99999999999999999999'"),
        (with_field("logit_bias", '{"\\u0661": 1}'), "logit_bias names token '\u0661'"),
        (with_field("logit_bias", '{"1": 1e300}'), "'logit_bias.1': Input should be less than or equal to 100"),
        (with_field("\\u0000", "1"), "Unrecognized request argument supplied"),
        (json.dumps({**CHAT, "model": "m" * 1001}).encode(), "'model': String should have at most 1000 characters"),
        (with_arguments(deep(100_000)), "maximum context length"),
    ],
    ids=lambda value: repr(value[:40]),
)
async def test_garbage_is_refused_in_words_and_leaves_no_record(
    tmp_path: Path, database: Database, body: bytes, words: str
) -> None:
    async with scene(tmp_path, database) as found:
        answer = await post(found, body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
        assert words in answer.json()["error"]["message"]
        assert (list(await found.calls()), found.engine.requests) == ([], [])


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "{",
        '{"a": 1e999}',
        '{"a": ' + "9" * 400 + "}",
        '{"a": "\\ud800"}',
        '"\\ud800"',
        '{"a": "\\u0000"}',
        deep(900),
    ],
)
async def test_arguments_that_are_no_good_json_are_served_as_the_text_they_are(
    tmp_path: Path, database: Database, arguments: str
) -> None:
    async with scene(tmp_path, database) as found:
        answer = await post(found, with_arguments(arguments))
        assert answer.status_code == 200, answer.text
        assert [row.status for row in await found.calls()] == ["completed"]


@pytest.mark.parametrize("block", ['{"name": "f\\ud800", "arguments": {}}', '{"name": "f", "arguments": "\\ud800"}'])
async def test_a_sampled_tool_call_that_is_no_unicode_is_content(
    tmp_path: Path, database: Database, block: str
) -> None:
    said = f"<tool_call>{block}</tool_call>"
    async with scene(tmp_path, database, says=said, context_length=8192) as found:
        tool = {"type": "function", "function": {"name": "f"}}
        answer = await post(found, json.dumps({**CHAT, "tools": [tool]}).encode())
        assert answer.status_code == 200, answer.text
        message = answer.json()["choices"][0]["message"]
        assert (message["content"], message.get("tool_calls")) == (said, None)
