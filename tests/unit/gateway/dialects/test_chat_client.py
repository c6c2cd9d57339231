"""A request in any dialect asks another provider for what it asked the gateway for."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, cast

import pytest

from leyden.libs.contracts.conversation import Json
from leyden.services.gateway.dialects.base import WireFormat
from leyden.services.gateway.dialects.chat_client import read_answer, request_document
from leyden.services.gateway.dialects.chat_completions import ChatCompletions
from leyden.services.gateway.dialects.gemini.dialect import Gemini
from leyden.services.gateway.dialects.messages import Messages
from leyden.services.gateway.dialects.ollama import OllamaChat
from leyden.services.gateway.dialects.responses.dialect import Responses

NOTHING = cast(Any, None)
TURN = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {}}
MESSAGES = {"model": "m", "max_tokens": 9, "messages": [TURN]}
MESSAGES_TOOLS = {**MESSAGES, "tools": [{"name": name, "input_schema": SCHEMA} for name in ("f", "g")]}
RESPONSES = {"model": "m", "input": "hi"}
RESPONSES_TOOLS = {**RESPONSES, "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]}
GEMINI = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}
GEMINI_TOOLS = {**GEMINI, "tools": [{"functionDeclarations": [{"name": "f"}, {"name": "g"}]}]}
OLLAMA = {"model": "m", "messages": [TURN], "tools": [{"type": "function", "function": {"name": "f"}}]}
EXTRAS = {"top_k": 40, "min_p": 0.1, "repetition_penalty": 1.2}
CHOICES = ("n", "tool_choice", "parallel_tool_calls", "frequency_penalty", "presence_penalty")


def sent(wire_format: WireFormat, body: Json) -> Json:
    request = wire_format.parse(json.dumps(body).encode(), max_choices=4)
    document = request_document(request, "other", limit_name="max_tokens")
    return {name: document[name] for name in CHOICES if name in document}


@pytest.mark.parametrize(
    ("wire_format", "body", "written"),
    [
        (Messages(), MESSAGES | {"top_k": 40}, {"top_k": 40}),
        (Gemini("m"), GEMINI | {"generationConfig": {"topK": 40}}, {"top_k": 40}),
        (OllamaChat(), OLLAMA | {"options": {"top_k": 40, "min_p": 0.1, "repeat_penalty": 1.2}}, EXTRAS),
        (OllamaChat(), OLLAMA | {"options": {"top_k": 0, "min_p": 0, "repeat_penalty": 1.0}}, {}),
    ],
)
def test_a_provider_gets_extra_parameters_where_it_takes_them(
    wire_format: WireFormat, body: Json, written: Json
) -> None:
    request = wire_format.parse(json.dumps(body).encode(), max_choices=4)
    for takes_extras in (True, False):
        document = request_document(request, "other", limit_name="max_tokens", takes_extras=takes_extras)
        assert {name: document[name] for name in EXTRAS if name in document} == (written if takes_extras else {})


def test_a_body_of_chat_completions_keeps_its_extra_parameters() -> None:
    body = {"model": "m", "messages": [TURN], "min_tokens": 3, "seed": 5, "stop": ["a"], "logit_bias": {"1": 2}}
    request = ChatCompletions().parse(json.dumps(body | EXTRAS).encode(), max_choices=4)
    document = request_document(request, "other", limit_name="max_tokens")
    assert document == body | EXTRAS | {"model": "other"}


def ollama_turns(*names: str) -> Json:
    calls = [{"function": {"name": name, "arguments": {}}} for name in names]
    results = [{"role": "tool", "tool_name": name, "content": name} for name in reversed(names)]
    return OLLAMA | {"messages": [TURN, {"role": "assistant", "content": "", "tool_calls": calls}, *results]}


def gemini_turns(*names: str) -> Json:
    calls = [{"functionCall": {"name": name, "args": {}}} for name in names]
    results = [{"functionResponse": {"name": name, "response": {"result": name}}} for name in reversed(names)]
    return GEMINI | {
        "contents": [*GEMINI["contents"], {"role": "model", "parts": calls}, {"role": "user", "parts": results}]
    }


@pytest.mark.parametrize(("wire_format", "turns"), [(OllamaChat(), ollama_turns), (Gemini("m"), gemini_turns)])
def test_a_provider_gets_ids_for_calls_and_results_that_have_none(
    wire_format: WireFormat, turns: Callable[..., Json]
) -> None:
    request = wire_format.parse(json.dumps(turns("f", "g", "f")).encode(), max_choices=4)
    _, asked, *results = request_document(request, "other", limit_name="max_tokens")["messages"]
    calls = [(call["id"], call["function"]["name"]) for call in asked["tool_calls"]]
    assert calls == [("call_1_0", "f"), ("call_1_1", "g"), ("call_1_2", "f")]
    assert [(result["tool_call_id"], result["content"]) for result in results] == [
        ("call_1_0", "f"), ("call_1_1", "g"), ("call_1_2", "f")
    ]  # fmt: skip


def test_a_result_without_a_name_answers_the_first_open_call_and_ids_stay_as_they_are() -> None:
    calls = [{"id": name, "function": {"name": "f", "arguments": {}}} for name in ("a", "b", "")]
    results = [{"role": "tool", "content": "x", **given} for given in ({"tool_call_id": "b"}, {}, {}, {})]
    body = OLLAMA | {"messages": [TURN, {"role": "assistant", "content": "", "tool_calls": calls}, *results]}
    request = OllamaChat().parse(json.dumps(body).encode(), max_choices=4)
    _, asked, *answers = request_document(request, "other", limit_name="max_tokens")["messages"]
    assert [call["id"] for call in asked["tool_calls"]] == ["a", "b", "call_1_2"]
    assert [answer.get("tool_call_id") for answer in answers] == ["b", "a", "call_1_2", None]


def calling(**config: Any) -> Json:
    return {"toolConfig": {"functionCallingConfig": config}}


@pytest.mark.parametrize(
    ("wire_format", "body", "asked"),
    [
        (Messages(), MESSAGES_TOOLS, {}),
        (Messages(), MESSAGES, {}),
        (Messages(), MESSAGES_TOOLS | {"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        (
            Messages(),
            MESSAGES_TOOLS | {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            Messages(),
            MESSAGES_TOOLS | {"tool_choice": {"type": "tool", "name": "g"}},
            {"tool_choice": {"type": "function", "function": {"name": "g"}}},
        ),
        (Responses(NOTHING, NOTHING), RESPONSES_TOOLS | {"tool_choice": "none"}, {"tool_choice": "none"}),
        (
            Responses(NOTHING, NOTHING),
            RESPONSES_TOOLS | {"parallel_tool_calls": False},
            {"parallel_tool_calls": False},
        ),
        (Responses(NOTHING, NOTHING), RESPONSES | {"tool_choice": "none", "parallel_tool_calls": False}, {}),
        (Gemini("m"), GEMINI_TOOLS | calling(mode="NONE"), {"tool_choice": "none"}),
        (Gemini("m"), GEMINI_TOOLS | calling(mode="ANY"), {"tool_choice": "required"}),
        (Gemini("m"), GEMINI | {"generationConfig": {"candidateCount": 3}}, {"n": 3}),
        (
            Gemini("m"),
            GEMINI | {"generationConfig": {"frequencyPenalty": 0.5, "presencePenalty": -0.5}},
            {"frequency_penalty": 0.5, "presence_penalty": -0.5},
        ),
        (OllamaChat(), OLLAMA, {}),
    ],
)
def test_a_provider_is_told_of_choices_and_of_how_tools_may_be_called(
    wire_format: WireFormat, body: Json, asked: Json
) -> None:
    assert sent(wire_format, body) == asked


@pytest.mark.parametrize(
    ("reason", "finish"), [("stop", "tool_calls"), ("tool_calls", "tool_calls"), ("length", "length")]
)
def test_an_answer_with_calls_ends_with_them_whatever_the_provider_says(reason: str, finish: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    body = json.dumps({"choices": [{"message": message, "finish_reason": reason}]}).encode()
    assert read_answer(body, 1, "r").answers[0].finish_reason == finish


def test_without_tools_a_provider_gets_no_choice_of_them() -> None:
    body = {"model": "m", "messages": [TURN], "tool_choice": "none", "parallel_tool_calls": False}
    assert sent(ChatCompletions(), body) == {}


@pytest.mark.parametrize(
    ("count", "details", "told"),
    [
        (1, {"reasoning_tokens": 5}, 5),
        (2, {"reasoning_tokens": 5}, None),
        (1, None, None),
        # A provider that counts reasoning beside the answer's tokens, and shapes that OpenAI's API does not have.
        (1, {"reasoning_tokens": 94}, None),
        (1, {"reasoning_tokens": -1}, None),
        (1, {"reasoning_tokens": 1.5}, None),
        (1, [], None),
        (1, "none", None),
    ],
)
def test_a_provider_counts_the_reasoning_of_one_answer(count: int, details: Any, told: int | None) -> None:
    choices = [{"message": {"content": "hi"}, "finish_reason": "stop"}] * count
    usage = {"prompt_tokens": 1, "completion_tokens": 9, "completion_tokens_details": details}
    answers = read_answer(json.dumps({"choices": choices, "usage": usage}).encode(), count, "r").answers
    assert [answer.reasoning_tokens for answer in answers] == [told] * count
