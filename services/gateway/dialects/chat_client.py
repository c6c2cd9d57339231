"""The other side of chat completions: writes the request to another provider, and reads its answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from leyden.libs.contracts.conversation import Dialect, Json, ToolCall, Turn
from leyden.services.gateway.conversation import Answer, ModelRequest
from leyden.services.gateway.dialects.chat_completions import tool_call

NOT_SENT = frozenset({"model", "stream", "stream_options", "logprobs", "top_logprobs", "chat_template_kwargs"})
"""Parameters of a request that concern the model or the stream of the gateway."""


def request_document(request: ModelRequest, model: str) -> Json:
    """Returns the body of a request in any wire format as one of chat completions, for a model of this name."""
    is_chat = request.dialect is Dialect.CHAT_COMPLETIONS
    parameters = request.parameters if is_chat else _parameters(request)
    document: Json = {name: value for name, value in parameters.items() if name not in NOT_SENT}
    # A greedy rollout has another temperature than its agent asked for.
    if request.sampling.temperature is not None:
        document["temperature"] = request.sampling.temperature
    if request.tools:
        document["tools"] = list(request.tools)
    return {**document, "model": model, "messages": [_message(turn) for turn in request.turns]}


def read_answers(document: Mapping[str, Any], count: int, request_id: str) -> tuple[Answer, ...]:
    """Returns the first `count` choices of a `chat.completion` object.

    Args:   request_id: makes the ids of tool calls that have none
    Raises: LookupError, TypeError, AttributeError: it is none, or has fewer choices
    """
    return tuple(_answer(document["choices"][index], index, request_id) for index in range(count))


def _parameters(request: ModelRequest) -> Json:
    sampling = request.sampling
    sent: Json = {"max_tokens": sampling.max_tokens, "seed": sampling.seed}
    sent["stop"] = list(sampling.stop) or None
    sent["top_p"] = sampling.top_p if sampling.top_p != 1.0 else None
    sent["tool_choice"] = "required" if request.required_tools else None
    if request.answer_schema is not None:
        schema = {"name": "answer", "schema": request.answer_schema}
        sent["response_format"] = {"type": "json_schema", "json_schema": schema}
    return {name: value for name, value in sent.items() if value is not None}


def _message(turn: Turn) -> Json:
    message: Json = {"role": turn.role, "content": turn.content, "name": turn.name, "tool_call_id": turn.tool_call_id}
    message["tool_calls"] = list(map(tool_call, turn.tool_calls)) or None
    return {name: value for name, value in message.items() if value is not None}


def _answer(choice: Mapping[str, Any], index: int, request_id: str) -> Answer:
    message = choice["message"]
    calls = tuple(
        ToolCall(
            call.get("id") or f"call_{request_id}_{number}", call["function"]["name"], call["function"]["arguments"]
        )
        for number, call in enumerate(message.get("tool_calls") or ())
    )
    reasoning = message.get("reasoning_content") or None
    turn = Turn("assistant", message.get("content") or "", tool_calls=calls, reasoning=reasoning)
    finish = choice.get("finish_reason")
    return Answer(index, turn, finish if finish in {"length", "tool_calls"} else "stop", None)
