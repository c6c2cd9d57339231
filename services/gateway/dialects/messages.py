"""Messages: Anthropic's `POST /v1/messages`, validated, answered in one body or as a stream of named events.

Fields that do not change how this model samples text are recorded and have no other effect, also unknown ones, because
Anthropic's clients send new ones with every release. The dialect refuses what it cannot serve by name: images,
documents, Anthropic's own tools that the agent runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field

from leyden.libs.contracts.conversation import Dialect, Json, Tool, ToolCall, Turn
from leyden.services.gateway.calls.context import Answer, Completion, ModelRequest, Sampling, TokenLogprob
from leyden.services.gateway.dialects.arguments import arguments_object, arguments_text
from leyden.services.gateway.dialects.base import WireFormat
from leyden.services.gateway.dialects.body import Integer, Wire, answer_schema, read_object, required_tools, validated
from leyden.services.gateway.dialects.hosted import without_hosted
from leyden.services.gateway.errors import BadRequest, GatewayError

ERROR_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 408: "timeout_error", 413: "request_too_large", 415: "invalid_request_error",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
"""Anthropic's error type by HTTP status; any other is an `api_error`."""
STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens"}
CONVERSATION = frozenset({"messages", "system", "tools"})
SIGNATURE = "leyden"
"""The signature of every thinking block: Anthropic's clients expect one."""


class _Block(Wire):
    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    tool_name: str | None = None
    content: str | list[_Block] | None = None
    is_error: bool | None = None


class _Message(Wire):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


class _Tool(Wire):
    type: str | None = None
    name: str | None = Field(default=None, min_length=1)
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class _ToolChoice(Wire):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Thinking(Wire):
    type: str


class _Format(Wire):
    type: str
    definition: dict[str, Any] | None = Field(default=None, alias="schema")


class _OutputConfig(Wire):
    format: _Format | None = None


class _Body(Wire):
    model: str = Field(max_length=1000)
    messages: list[_Message] = Field(min_length=1)
    system: str | list[_Block] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    stream: bool | None = None
    max_tokens: Integer | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: Integer | None = Field(default=None, ge=-1, le=2**30)
    stop_sequences: list[Annotated[str, Field(min_length=1, max_length=1000)]] | None = Field(
        default=None, max_length=16
    )
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    output_format: _Format | None = None
    mcp_servers: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Messages(WireFormat):
    """The dialect of messages."""

    def parse(self, body: bytes, *, max_choices: int) -> ModelRequest:
        """Parses and validates a body.

        Raises: BadRequest: not JSON, a field is wrong, or the model cannot serve a field
        """
        document = read_object(body, param="messages")
        parsed = validated(_Body, document, {})
        _refuse_unsupported(parsed)
        options = _template_options(parsed)
        parameters = {name: value for name, value in document.items() if name not in CONVERSATION}
        choice = parsed.tool_choice
        offered, hosted = without_hosted(document.get("tools") or (), {None, "custom"})
        tools = tuple(_tool(_Tool.model_validate(tool), f"tools.{index}") for index, tool in enumerate(offered))
        return ModelRequest(
            dialect=Dialect.MESSAGES,
            model=parsed.model,
            turns=tuple(_turns(parsed)),
            tools=tools,
            parses_tool_calls=bool(tools) and (choice is None or choice.type != "none"),
            parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
            stream=bool(parsed.stream),
            include_usage=True,
            choices=1,
            logprobs=False,
            top_logprobs=0,
            sampling=Sampling(
                temperature=parsed.temperature,
                top_p=1.0 if parsed.top_p is None else parsed.top_p,
                top_k=parsed.top_k or -1,
                stop=tuple(parsed.stop_sequences or ()),
                max_tokens=parsed.max_tokens,
            ),
            template_options=options,
            parameters=parameters | hosted | ({"chat_template_kwargs": options} if options else {}),
            body_sha256=hashlib.sha256(body).digest(),
            answer_schema=_schema(parsed),
            required_tools=_required(choice, tools),
            asks_for_reasoning=_asks_for_thinking(parsed.thinking),
        )

    def body(self, request: ModelRequest, completion: Completion) -> Json:
        """Returns a `message` object."""
        (answer,) = completion.answers
        message = _envelope(completion.request_id, completion.model, _usage(completion))
        return message | _stop(answer) | {"content": _blocks(request, answer.turn)}

    def stream(self, request: ModelRequest, request_id: str, created: int, prompt_tokens: int) -> MessageEvents:
        """Returns a writer of a message's events."""
        return MessageEvents(request, request_id, prompt_tokens)

    def error(self, error: GatewayError) -> Json:
        """Returns Anthropic's error object."""
        kind = ERROR_TYPES.get(error.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}}


class MessageEvents:
    """The events of one stream: a message's start, its content blocks one after the other, its end."""

    error_is_final = False

    def __init__(self, request: ModelRequest, request_id: str, prompt_tokens: int) -> None:
        usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
        message = _envelope(request_id, request.model, usage)
        self._unsent_start = _event("message_start", message=message) + _event("ping")
        self._block = -1
        self._is_open = False
        self._shows_thinking = request.asks_for_reasoning
        self._is_thinking = False

    @property
    def keepalive(self) -> bytes:
        """The message's start where it was not sent, and a ping."""
        return self._start() or _event("ping")

    def reasoning(self, _index: int, text: str) -> bytes:
        """Encodes more thinking; none where the request asks for none."""
        if not self._shows_thinking:
            return b""
        return self._start() + self._thinking_started() + self._delta("thinking_delta", thinking=text)

    def text(self, _index: int, text: str, _logprobs: Sequence[TokenLogprob] | None) -> bytes:
        """Encodes more text."""
        return self._start() + self._text(text)

    def rest(self, answer: Answer, text: str, _logprobs: Sequence[TokenLogprob] | None) -> bytes:
        """Encodes the last text, and a block for each tool call."""
        events = [self._start(), self._text(text), self._thinking_ended()]
        if self._block < 0 and not answer.turn.tool_calls:
            events.append(self._start_block({"type": "text", "text": ""}))
        events.append(self._stop_block())
        for call in answer.turn.tool_calls:
            block = _tool_use(call)
            arguments = orjson.dumps(block["input"]).decode()
            events += [
                self._start_block(block | {"input": {}}),
                self._delta("input_json_delta", partial_json=arguments),
                self._stop_block(),
            ]
        return b"".join(events)

    def end(self, completion: Completion) -> bytes:
        """Encodes stop reason and usage, and the message's end."""
        (answer,) = completion.answers
        return _event("message_delta", delta=_stop(answer), usage=_usage(completion)) + _event("message_stop")

    def error(self, error: GatewayError) -> bytes:
        """Encodes an error event; a client raises it, as no message's end follows."""
        return _event("error", **{"error": Messages().error(error)["error"]})

    def _start(self) -> bytes:
        start, self._unsent_start = self._unsent_start, b""
        return start

    def _thinking_started(self) -> bytes:
        if self._is_thinking:
            return b""
        self._is_thinking = True
        # A model may think again after a text.
        return self._stop_block() + self._start_block({"type": "thinking", "thinking": "", "signature": ""})

    def _thinking_ended(self) -> bytes:
        if not self._is_thinking:
            return b""
        self._is_thinking = False
        return self._delta("signature_delta", signature=SIGNATURE) + self._stop_block()

    def _text(self, text: str) -> bytes:
        if not text:
            return b""
        ended = self._thinking_ended()
        start = b"" if self._is_open else self._start_block({"type": "text", "text": ""})
        return ended + start + self._delta("text_delta", text=text)

    def _start_block(self, block: Json) -> bytes:
        self._block += 1
        self._is_open = True
        return _event("content_block_start", index=self._block, content_block=block)

    def _delta(self, kind: str, **fields: str) -> bytes:
        return _event("content_block_delta", index=self._block, delta={"type": kind, **fields})

    def _stop_block(self) -> bytes:
        was_open, self._is_open = self._is_open, False
        return _event("content_block_stop", index=self._block) if was_open else b""


def _asks_for_thinking(thinking: _Thinking | None) -> bool:
    return thinking is not None and thinking.type != "disabled"


def _template_options(body: _Body) -> Json:
    # The name that the templates of Qwen, GLM, SmolLM and others read.
    asked = {} if body.thinking is None else {"enable_thinking": body.thinking.type != "disabled"}
    return asked | (body.chat_template_kwargs or {})


def _refuse_unsupported(body: _Body) -> None:
    if body.mcp_servers:
        message = "mcp_servers is not supported: connect the agent to the servers, and send their tools in `tools`."
        raise BadRequest(message, param="mcp_servers", code="unsupported_parameter")
    if body.messages[-1].role == "assistant":
        message = (
            "This model does not support assistant message prefill: the conversation must end with a user message."
        )
        raise BadRequest(message, param="messages", code="unsupported_content")


def _schema(body: _Body) -> Json | None:
    for param, form in (
        ("output_config.format", body.output_config.format if body.output_config else None),
        ("output_format", body.output_format),
    ):
        if form is not None:
            return answer_schema(form.type, form.definition, param=param, place=f"{param}.schema")
    return None


def _required(choice: _ToolChoice | None, tools: Sequence[Tool]) -> tuple[str, ...]:
    if choice is None or choice.type not in {"any", "tool"}:
        return ()
    return required_tools(tools, None if choice.type == "any" else [choice.name or ""])


def _tool(tool: _Tool, place: str) -> Tool:
    for field, value in (("name", tool.name), ("input_schema", tool.input_schema)):
        if value is None:
            raise BadRequest(f"Missing required parameter: '{place}.{field}'.", param=place, code="invalid_value")
    described = {} if tool.description is None else {"description": tool.description}
    strict = {"strict": True} if tool.strict else {}
    return Tool.of({"name": tool.name, **described, "parameters": tool.input_schema, **strict})


def _turns(body: _Body) -> Iterator[Turn]:
    if system := _text(body.system or "", "system"):
        yield Turn("system", system)
    calls: set[str] = set()
    for index, message in enumerate(body.messages):
        place = f"messages.{index}.content"
        if message.role == "assistant":
            turn = _assistant(message.content, place)
            calls.update(call.id for call in turn.tool_calls)
            yield turn
        elif message.role == "user" and not isinstance(message.content, str):
            yield from _user(message.content, calls, place)
        else:
            yield Turn(message.role, _text(message.content, place))


def _user(blocks: list[_Block], calls: set[str], place: str) -> Iterator[Turn]:
    if not blocks:
        yield Turn("user", "")
    for is_result, group in groupby(blocks, key=lambda block: block.type == "tool_result"):
        if not is_result:
            yield Turn("user", _text(list(group), place))
            continue
        for block in group:
            if block.tool_use_id not in calls:
                message = f"{place}: the tool_result for '{block.tool_use_id}' has no tool_use block before it."
                raise BadRequest(message, param=place, code="invalid_value")
            text = _text(block.content or "", place)
            yield Turn("tool", text, tool_call_id=block.tool_use_id, is_error=bool(block.is_error))


def _assistant(content: str | list[_Block], place: str) -> Turn:
    if isinstance(content, str):
        return Turn("assistant", content)
    thinking = [block.thinking or "" for block in content if block.type == "thinking"]
    calls = tuple(_tool_call(block, place) for block in content if block.type == "tool_use")
    others = {"thinking", "redacted_thinking", "tool_use"}
    text = _text([block for block in content if block.type not in others], place)
    return Turn("assistant", text, tool_calls=calls, reasoning="\n".join(thinking) if thinking else None)


def _tool_call(block: _Block, place: str) -> ToolCall:
    if not block.id or not block.name:
        raise BadRequest(f"{place}: a tool_use block needs an id and a name.", param=place, code="invalid_value")
    return ToolCall(block.id, block.name, arguments_text(block.input or {}))


def _text(content: str | list[_Block], place: str) -> str:
    if isinstance(content, str):
        return content
    texts = [block.text if block.type == "text" else _reference(block) for block in content]
    for block, text in zip(content, texts, strict=True):
        if text is None:
            message = f"{place} has a block of type '{block.type}': this model reads text, tool calls and tool results."
            raise BadRequest(message, param=place, code="unsupported_content")
    return "\n".join(filter(None, texts))


def _reference(block: _Block) -> str | None:
    """A search's result names a tool, which the request offers among its tools; None for any other block."""
    return f"Tool found: {block.tool_name}" if block.type == "tool_reference" and block.tool_name else None


def _blocks(request: ModelRequest, turn: Turn) -> list[Json]:
    blocks: list[Json] = []
    if turn.reasoning and request.asks_for_reasoning:
        blocks.append({"type": "thinking", "thinking": turn.reasoning, "signature": SIGNATURE})
    if turn.content or not (blocks or turn.tool_calls):
        blocks.append({"type": "text", "text": turn.content})
    return [*blocks, *map(_tool_use, turn.tool_calls)]


def _tool_use(call: ToolCall) -> Json:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments_object(call.arguments)}


def _stop(answer: Answer) -> Json:
    if answer.finish_reason == "stop" and answer.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop}
    return {"stop_reason": STOP_REASONS.get(answer.finish_reason, "end_turn"), "stop_sequence": None}


def _usage(completion: Completion) -> Json:
    return {
        "input_tokens": completion.prompt_tokens - completion.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": completion.cached_tokens,
        "output_tokens": completion.completion_tokens,
    }


def _envelope(request_id: str, model: str, usage: Json) -> Json:
    return {
        "id": f"msg_{request_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **fields}) + b"\n\n"
