"""Limits of a body, which hold before it is parsed, and the chunks of a stream."""

from __future__ import annotations

import json
from typing import Any

import pytest

from leyden.libs.contracts.conversation import ToolCall, Turn
from leyden.services.gateway.calls.context import Answer, TokenLogprob
from leyden.services.gateway.dialects.body import MAX_VALUES
from leyden.services.gateway.dialects.chat_completions import ChatCompletions
from leyden.services.gateway.errors import BadRequest


def body(*contents: str, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": content} for content in contents]
    return json.dumps({"model": "m", "messages": messages, **fields}).encode()


@pytest.mark.parametrize(
    "fields", [{"metadata": [[]] * MAX_VALUES}, {"tools": [{}] * MAX_VALUES}, {"stop": [0] * 200_000}]
)
def test_a_body_of_more_values_than_can_be_read_in_a_moment_is_refused_unread(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="more than 100000 values") as refused:
        # The body is broken at its end, which nobody reads.
        ChatCompletions().parse(body("hi", **fields) + b"!", max_choices=1)
    assert refused.value.code == "too_many_values"


@pytest.mark.parametrize(
    "text", ["1, " * 2 * MAX_VALUES, '[{"a\\":[1,2' * MAX_VALUES, '\\"' * MAX_VALUES + "," * MAX_VALUES]
)
def test_brackets_and_commas_inside_strings_are_not_counted(text: str) -> None:
    [turn] = ChatCompletions().parse(body(text), max_choices=1).turns
    assert turn.content == text


@pytest.mark.parametrize(("text", "kinds"), [("", ["tool_calls"] * 2), ("So:", ["content", *["tool_calls"] * 2])])
def test_a_stream_has_one_chunk_for_each_tool_call(text: str, kinds: list[str]) -> None:
    request = ChatCompletions().parse(body("hi", stream=True), max_choices=1)
    turn = Turn("assistant", text, tool_calls=(ToolCall("1", "f", "{}"), ToolCall("2", "g", "{}")))
    logprobs = (TokenLogprob("So", -0.5),)
    events = ChatCompletions().stream(request, "c1", 0, 1).rest(Answer(0, turn, "tool_calls", logprobs), text, logprobs)
    choices = [
        json.loads(event.removeprefix("data: "))["choices"][0] for event in events.decode().strip().split("\n\n")
    ]
    deltas = [choice["delta"] for choice in choices]
    assert [next(reversed(delta)) for delta in deltas] == kinds
    assert ["role" in delta for delta in deltas] == [True, *[False] * (len(deltas) - 1)]
    assert [choice["logprobs"] is None for choice in choices] == [False, *[True] * (len(deltas) - 1)]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [(call["index"], call["id"], call["function"]["name"]) for call in calls] == [(0, "1", "f"), (1, "2", "g")]
