"""Ollama's `POST /api/chat`, validated, answered in one body or as a stream of lines of JSON.

The default is a stream, as Ollama's is. Options that change how this model samples text have the names and the meaning
that Ollama gives them, and no defaults of its own: without them the run's temperature samples from the whole
distribution. All other options and fields are recorded without an effect.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field

from leyden.libs.contracts.conversation import Dialect, Json, Tool, ToolCall, Turn
from leyden.services.gateway.calls.context import Answer, Completion, ModelRequest, Sampling, TokenLogprob
from leyden.services.gateway.dialects.arguments import arguments_object, arguments_text
from leyden.services.gateway.dialects.base import WireFormat
from leyden.services.gateway.dialects.body import Integer, Wire, read_object, validated
from leyden.services.gateway.dialects.chat_completions import StopText, logprobs_of
from leyden.services.gateway.errors import BadRequest, GatewayError
from leyden.services.gateway.schemas import check_schema

CONVERSATION = frozenset({"messages", "tools"})


class _CalledFunction(Wire):
    name: str
    arguments: dict[str, Any] | str = Field(default_factory=dict)


class _ToolCall(Wire):
    id: str = ""
    function: _CalledFunction


class _Message(Wire):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class _Function(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    name: str = Field(min_length=1)


class _Tool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["function"] = "function"
    function: _Function


class _Options(Wire):
    temperature: float | None = Field(default=None, ge=0, le=2)
    num_predict: Integer | None = Field(default=None, ge=-2)
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    seed: Integer | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: Integer | None = Field(default=None, ge=-1, le=2**30)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repeat_penalty: float | None = Field(default=None, ge=0.01, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)


class _Body(Wire):
    model: str = Field(max_length=1000)
    messages: list[_Message] = Field(min_length=1)
    tools: list[_Tool] | None = None
    stream: bool | None = None
    think: bool | str | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: _Options | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = Field(default=None, ge=0, le=20)


class OllamaChat(WireFormat):
    """The dialect of Ollama's chat."""

    stream_type = "application/x-ndjson"

    def parse(self, body: bytes, *, max_choices: int) -> ModelRequest:
        """Parses and validates a body.

        Raises: BadRequest: not JSON, a field is wrong, or the model cannot serve a field
        """
        document = read_object(body, param="messages")
        parsed = validated(_Body, document, {})
        tools = tuple(Tool({"type": "function", **tool}) for tool in document.get("tools") or ())
        thinks = {} if parsed.think is None else {"enable_thinking": parsed.think is not False}
        parameters = {name: value for name, value in document.items() if name not in CONVERSATION}
        return ModelRequest(
            dialect=Dialect.OLLAMA_CHAT,
            model=parsed.model,
            turns=tuple(_turns(parsed.messages)),
            tools=tools,
            parses_tool_calls=bool(tools),
            parallel_tool_calls=True,
            stream=parsed.stream is not False,
            include_usage=True,
            choices=1,
            logprobs=bool(parsed.logprobs),
            top_logprobs=(parsed.top_logprobs or 0) if parsed.logprobs else 0,
            sampling=_sampling(parsed.options or _Options()),
            template_options=thinks,
            parameters=parameters | ({"chat_template_kwargs": thinks} if thinks else {}),
            body_sha256=hashlib.sha256(body).digest(),
            answer_schema=_schema(parsed.format),
            asks_for_reasoning=bool(parsed.think),
        )

    def body(self, _request: ModelRequest, completion: Completion) -> Json:
        """Returns the one object of an answer without streaming."""
        (answer,) = completion.answers
        message: Json = {"role": "assistant", "content": answer.turn.content}
        if answer.turn.reasoning:
            message["thinking"] = answer.turn.reasoning
        if answer.turn.tool_calls:
            message["tool_calls"] = list(map(_tool_call, answer.turn.tool_calls))
        document = _document(completion.model, completion.created, message, answer.logprobs)
        return document | _end(answer, completion)

    def stream(self, request: ModelRequest, _request_id: str, created: int, _prompt_tokens: int) -> ChatLines:
        """Returns a writer of an answer's lines."""
        return ChatLines(request, created)

    def error(self, error: GatewayError) -> Json:
        """Returns Ollama's error object."""
        return {"error": error.message}


class ChatLines:
    """The lines of one stream; each is an object with a part of the message, the last one has `done`."""

    error_is_final = False

    def __init__(self, request: ModelRequest, created: int) -> None:
        self._model = request.model
        self._created = created

    @property
    def keepalive(self) -> bytes:
        """A line with an empty text: lines have no comments."""
        return self._line({"content": ""})

    def reasoning(self, _index: int, text: str) -> bytes:
        """Encodes more thinking."""
        return self._line({"content": "", "thinking": text})

    def text(self, _index: int, text: str, logprobs: Sequence[TokenLogprob] | None) -> bytes:
        """Encodes more text."""
        return self._line({"content": text}, logprobs)

    def rest(self, answer: Answer, text: str, logprobs: Sequence[TokenLogprob] | None) -> bytes:
        """Encodes the last text, and a line with the tool calls; no bytes where there are neither."""
        lines = self._line({"content": text}, logprobs) if text or logprobs else b""
        if answer.turn.tool_calls:
            lines += self._line({"content": "", "tool_calls": list(map(_tool_call, answer.turn.tool_calls))})
        return lines

    def end(self, completion: Completion) -> bytes:
        """Encodes the line with the reason of the end and the numbers of tokens."""
        (answer,) = completion.answers
        return self._line({"content": ""}, None, _end(answer, completion))

    def error(self, error: GatewayError) -> bytes:
        """Encodes a line with the error, which clients raise."""
        return orjson.dumps(OllamaChat().error(error)) + b"\n"

    def _line(self, part: Json, logprobs: Sequence[TokenLogprob] | None = None, end: Json | None = None) -> bytes:
        message = {"role": "assistant", **part}
        document = _document(self._model, self._created, message, logprobs)
        return orjson.dumps(document | (end or {"done": False})) + b"\n"


def _sampling(options: _Options) -> Sampling:
    stop = tuple(filter(None, (options.stop,) if isinstance(options.stop, str) else options.stop or ()))
    return Sampling(
        temperature=options.temperature,
        top_p=1.0 if options.top_p is None else options.top_p,
        top_k=options.top_k or -1,
        min_p=options.min_p or 0.0,
        frequency_penalty=options.frequency_penalty or 0.0,
        presence_penalty=options.presence_penalty or 0.0,
        repetition_penalty=options.repeat_penalty or 1.0,
        stop=stop,
        seed=options.seed,
        # -1 and -2 mean as many tokens as the context leaves.
        max_tokens=options.num_predict if (options.num_predict or 0) > 0 else None,
    )


def _schema(form: str | Json | None) -> Json | None:
    if form == "json":
        return {"type": "object"}
    if not isinstance(form, dict):
        return None
    check_schema(form, "format")
    return form


def _turns(messages: Sequence[_Message]) -> Iterator[Turn]:
    for index, message in enumerate(messages):
        if message.images:
            place = f"messages.{index}.images"
            raise BadRequest(f"{place}: this model reads text only.", param=place, code="unsupported_content")
        is_assistant, is_result = message.role == "assistant", message.role == "tool"
        calls = [
            ToolCall(call.id, call.function.name, _arguments(call.function.arguments))
            for call in message.tool_calls or ()
        ]
        yield Turn(
            message.role,
            message.content or "",
            name=message.tool_name if is_result else None,
            tool_calls=tuple(calls) if is_assistant else (),
            tool_call_id=message.tool_call_id if is_result else None,
            reasoning=message.thinking if is_assistant else None,
        )


def _arguments(arguments: Json | str) -> str:
    # Some clients send text, as OpenAI's do.
    return arguments if isinstance(arguments, str) else arguments_text(arguments)


def _tool_call(call: ToolCall) -> Json:
    return {"id": call.id, "function": {"name": call.name, "arguments": arguments_object(call.arguments)}}


def _document(model: str, created: int, message: Json, logprobs: Sequence[TokenLogprob] | None) -> Json:
    moment = datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")
    document: Json = {"model": model, "created_at": moment, "message": message}
    if logprobs is not None:
        document["logprobs"] = logprobs_of(logprobs)
    return document


def _end(answer: Answer, completion: Completion) -> Json:
    return {
        "done": True,
        "done_reason": "length" if answer.finish_reason == "length" else "stop",
        "prompt_eval_count": completion.prompt_tokens,
        "eval_count": completion.completion_tokens,
    }
