"""Limits of a body, which hold before it is parsed, and the chunks of a stream."""

from __future__ import annotations

import json
from typing import Any

import pytest

from leyden.libs.contracts.conversation import Tool, ToolCall, Turn
from leyden.services.gateway.calls.context import Answer, Completion, ModelRequest, TokenLogprob
from leyden.services.gateway.dialects.body import MAX_VALUES
from leyden.services.gateway.dialects.chat_client import request_document
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


GRAMMAR = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /x/"}}
CUSTOM = {"type": "custom", "custom": {"name": "patch", "description": "Patches.", "format": GRAMMAR}}
OWN = {"name": "own", "parameters": {"type": "object"}}
FUNCTION = {"type": "function", "function": OWN}
TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def parsed(*messages: Any, **fields: Any) -> ModelRequest:
    sent = {"model": "m", "messages": [{"role": "user", "content": "hi"}, *messages], **fields}
    return ChatCompletions().parse(json.dumps(sent).encode(), max_choices=1)


def answered(request: ModelRequest, *calls: ToolCall) -> tuple[Any, list[Any]]:
    """The choice of an answer in one body, and the choices of one that streams, without those that add nothing."""
    answer = Answer(0, Turn("assistant", "", tool_calls=calls), "tool_calls", None)
    completion = Completion("c1", "m", 0, None, (answer,), 1, 1, 0)
    [choice] = ChatCompletions().body(request, completion)["choices"]
    writer = ChatCompletions().stream(request, "c1", 0, 1)
    events = (writer.rest(answer, "", None) + writer.end(completion)).decode().strip().split("\n\n")
    chunks = [json.loads(one.removeprefix("data: "))["choices"][0] for one in events if not one.endswith("[DONE]")]
    return choice, chunks


def test_a_custom_tool_is_a_function_of_one_text() -> None:
    request = parsed(tools=[CUSTOM, FUNCTION], tool_choice={"type": "custom", "custom": {"name": "patch"}})
    described = "Patches.\n\nThe input has this lark grammar:\nstart: /x/"
    patch = {"name": "patch", "description": described, "parameters": TEXT}
    assert request.tools == (Tool.of(patch), Tool(FUNCTION))
    assert request.required_tools == ("patch",)
    assert request.parameters["wire_tools"] == {"patch": {"type": "custom", "name": "patch"}}
    choice, chunks = answered(request, ToolCall("1", "patch", '{"input": "a\\nb"}'), ToolCall("2", "own", "{}"))
    calls = [
        {"id": "1", "type": "custom", "custom": {"name": "patch", "input": "a\nb"}},
        {"id": "2", "type": "function", "function": {"name": "own", "arguments": "{}"}},
    ]
    assert (choice["message"]["tool_calls"], choice["finish_reason"]) == (calls, "tool_calls")
    streamed = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", [])]
    assert streamed == [{"index": place, **call} for place, call in enumerate(calls)]
    back = parsed({"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "x", "tool_call_id": "1"})
    assert back.turns[1].tool_calls == (ToolCall("1", "patch", '{"input": "a\\nb"}'), ToolCall("2", "own", "{}"))
    sent = request_document(request, "other", limit_name="max_tokens")
    assert sent["tool_choice"] == {"type": "function", "function": {"name": "patch"}}
    assert (sent["tools"], "wire_tools" in sent) == ([tool.document for tool in request.tools], False)


def test_allowed_tools_may_be_custom() -> None:
    allowed = {"mode": "required", "tools": [{"type": "custom", "custom": {"name": "patch"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    assert parsed(tools=[CUSTOM, FUNCTION], tool_choice=choice).required_tools == ("patch",)


def test_functions_from_before_there_were_tools_are_served() -> None:
    request = parsed(functions=[OWN], function_call={"name": "own"})
    assert (request.tools, request.required_tools, request.parallel_tool_calls) == ((Tool(FUNCTION),), ("own",), False)
    choice, chunks = answered(request, ToolCall("1", "own", '{"a": 1}'))
    call = {"name": "own", "arguments": '{"a": 1}'}
    assert (choice["message"]["function_call"], choice["finish_reason"]) == (call, "function_call")
    assert "tool_calls" not in choice["message"]
    assert [chunk["delta"].get("function_call") for chunk in chunks] == [call, None]
    assert [chunk["finish_reason"] for chunk in chunks] == [None, "function_call"]
    result = {"role": "function", "name": "own", "content": "2"}
    turns = parsed({"role": "assistant", "content": None, "function_call": call}, result, functions=[OWN]).turns
    assert turns[1].tool_calls == (ToolCall("call_1", "own", '{"a": 1}'),)
    assert turns[2] == Turn("tool", "2", name="own", tool_call_id="call_1")
    assert not parsed(functions=[OWN], function_call="none").parses_tool_calls
    sent = request_document(request, "other", limit_name="max_tokens")
    assert (sent["tool_choice"], "function_call" in sent) == ({"type": "function", "function": {"name": "own"}}, False)
    with pytest.raises(BadRequest, match="function_call names 'other'"):
        parsed(functions=[OWN], function_call={"name": "other"})


@pytest.mark.parametrize(("stop", "stops"), [("", ()), (["", "a"], ("a",)), ("a", ("a",))])
def test_an_empty_stop_string_stops_nothing(stop: Any, stops: tuple[str, ...]) -> None:
    assert parsed(stop=stop).sampling.stop == stops


@pytest.mark.parametrize("tool", [{"type": "custom"}, {"type": "function"}, {"type": "custom", "custom": {}}])
def test_a_tool_without_a_name_is_refused(tool: Any) -> None:
    with pytest.raises(BadRequest, match=r"tools\.0"):
        parsed(tools=[tool])


@pytest.mark.parametrize("parameters", [[1], "object", 5, True])
def test_a_strict_tool_whose_parameters_are_no_object_is_refused_by_name(parameters: Any) -> None:
    tool = {"type": "function", "function": {"name": "own", "strict": True, "parameters": parameters}}
    with pytest.raises(BadRequest, match="the tool 'own' must be a JSON object") as refused:
        parsed(tools=[FUNCTION, tool], tool_choice="required")
    assert refused.value.param == "tools[1].parameters"


@pytest.mark.parametrize("wrong", [{"format": "text"}, {"description": ["Patches."]}])
def test_a_custom_tool_of_another_form_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="custom tool patch is a text, and its format is an object"):
        parsed(tools=[{"type": "custom", "custom": {"name": "patch", **wrong}}])
