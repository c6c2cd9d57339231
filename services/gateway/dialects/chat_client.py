"""The other side of chat completions: writes the request to another provider, and reads its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson
from pydantic import BaseModel, ValidationError

from leyden.libs.contracts.conversation import Dialect, Json, ToolCall, Turn
from leyden.services.gateway.calls.context import Answer, ModelRequest
from leyden.services.gateway.dialects.body import first_reason
from leyden.services.gateway.dialects.custom import chat_call
from leyden.services.gateway.prompt.tools.ids import given_ids

NOT_SENT = frozenset(
    {
        *("model", "stream", "stream_options", "logprobs", "top_logprobs", "chat_template_kwargs", "hosted_tools"),
        *("wire_tools", "function_call"),
    }
)
"""Parameters of a request that concern the model or the stream of the gateway."""


class _Function(BaseModel):
    name: str
    arguments: str


class _Call(BaseModel):
    id: str | None = None
    function: _Function


class _Message(BaseModel):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _Usage(BaseModel):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    completion_tokens_details: Any = None

    @property
    def reasoning_tokens(self) -> int | None:
        """The number of reasoning tokens among the answer's; None where a provider counts them apart, or not."""
        details, total = self.completion_tokens_details, self.completion_tokens
        count = details.get("reasoning_tokens") if isinstance(details, dict) else None
        return count if isinstance(count, int) and 0 <= count <= (total or 0) else None


class _Completion(BaseModel):
    choices: list[_Choice]
    usage: _Usage | None = None


@dataclass(frozen=True, slots=True)
class ProvidedAnswer:
    """A provider's answer: the choices, and the tokens that it counted."""

    answers: tuple[Answer, ...]
    prompt_tokens: int
    completion_tokens: int


def request_document(request: ModelRequest, model: str, *, limit_name: str, takes_extras: bool = False) -> Json:
    """Returns the body of a request in any wire format as one of chat completions, for a model of this name.

    A body of chat completions goes on as its agent wrote it, whatever the provider takes.

    Args: limit_name: the parameter that limits the tokens of an answer
        takes_extras: whether the provider takes parameters of sampling that OpenAI's API does not have
    """
    is_chat = request.dialect is Dialect.CHAT_COMPLETIONS
    parameters = request.parameters if is_chat else _parameters(request, limit_name, takes_extras=takes_extras)
    document: Json = {name: value for name, value in parameters.items() if name not in NOT_SENT}
    if request.tools:
        document["tools"] = [tool.document for tool in request.tools]
    if is_chat and "wire_tools" in parameters:
        # The provider's tools are functions, and the choice may name one of another form.
        document["tool_choice"] = _choice(request)
        document["parallel_tool_calls"] = request.parallel_tool_calls
    if not request.tools:
        # As where all of them were the provider's own: without tools it refuses both.
        for name in ("tool_choice", "parallel_tool_calls"):
            document.pop(name, None)
    return {**document, "model": model, "messages": [_message(turn) for turn in given_ids(request.turns)]}


def read_answer(body: bytes, count: int, request_id: str) -> ProvidedAnswer:
    """Returns the first `count` choices of a `chat.completion` object.

    Args:   request_id: makes the ids of tool calls that have none
    Raises: ValueError: it is none, has text that is no Unicode, or has fewer choices
    """
    try:
        completion = _Completion.model_validate(orjson.loads(body), strict=True)
    except ValidationError as error:
        raise ValueError(first_reason(error)) from error
    if len(completion.choices) < count:
        raise ValueError(f"{len(completion.choices)} choices instead of {count}")
    usage = completion.usage or _Usage()
    # A provider has one count for all of its answers.
    reasoning = usage.reasoning_tokens if count == 1 else None
    answers = (_answer(completion.choices[index], index, request_id, reasoning) for index in range(count))
    return ProvidedAnswer(tuple(answers), usage.prompt_tokens or 0, usage.completion_tokens or 0)


def _parameters(request: ModelRequest, limit_name: str, *, takes_extras: bool) -> Json:
    sampling = request.sampling
    sent: Json = {limit_name: sampling.max_tokens, "seed": sampling.seed, "temperature": sampling.temperature}
    sent["stop"] = list(sampling.stop) or None
    sent["top_p"] = sampling.top_p if sampling.top_p != 1.0 else None
    sent["frequency_penalty"] = sampling.frequency_penalty or None
    sent["presence_penalty"] = sampling.presence_penalty or None
    if takes_extras:
        sent["top_k"] = sampling.top_k if sampling.top_k > 0 else None
        sent["min_p"] = sampling.min_p or None
        sent["repetition_penalty"] = sampling.repetition_penalty if sampling.repetition_penalty != 1.0 else None
    sent["n"] = request.choices if request.choices > 1 else None
    if request.tools:
        choice = _choice(request)
        sent["tool_choice"] = choice if choice != "auto" else None
        sent["parallel_tool_calls"] = None if request.parallel_tool_calls else False
    if request.answer_schema is not None:
        schema = {"name": "answer", "schema": request.answer_schema}
        sent["response_format"] = {"type": "json_schema", "json_schema": schema}
    return {name: value for name, value in sent.items() if value is not None}


def _choice(request: ModelRequest) -> Json | str:
    if len(request.required_tools) == 1:
        return {"type": "function", "function": {"name": request.required_tools[0]}}
    if request.required_tools:
        return "required"
    return "auto" if request.parses_tool_calls else "none"


def _message(turn: Turn) -> Json:
    message: Json = {"role": turn.role, "content": turn.content, "name": turn.name, "tool_call_id": turn.tool_call_id}
    message["tool_calls"] = [chat_call(call, {}) for call in turn.tool_calls] or None
    return {name: value for name, value in message.items() if value is not None}


def _answer(choice: _Choice, index: int, request_id: str, reasoning_tokens: int | None) -> Answer:
    message = choice.message
    calls = tuple(
        ToolCall(call.id or f"call_{request_id}_{number}", call.function.name, call.function.arguments)
        for number, call in enumerate(message.tool_calls or ())
    )
    turn = Turn("assistant", message.content or "", tool_calls=calls, reasoning=message.reasoning_content or None)
    # A provider may say `stop` where it was told which tool to call.
    called = "tool_calls" if calls else "stop"
    finish = "length" if choice.finish_reason == "length" else called
    return Answer(index, turn, finish, None, reasoning_tokens=reasoning_tokens)
