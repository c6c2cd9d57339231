"""Chat completions: OpenAI's `POST /v1/chat/completions`, validated, answered in one body or as a stream.

The dialect serves most parameters and refuses some by name (`REMEDIES`); all others have no effect and are recorded.
A call whose parameters change the distribution in a way that the trainer does not reproduce is stored as untrainable.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from leyden.libs.contracts.conversation import Dialect, Json, Tool, ToolCall, Turn
from leyden.services.gateway.calls.context import Answer, Completion, ModelRequest, Sampling, TokenLogprob
from leyden.services.gateway.dialects.base import WireFormat
from leyden.services.gateway.dialects.body import Integer, Wire, answer_schema, read_object, required_tools, validated
from leyden.services.gateway.dialects.custom import WireTools, arguments_of, chat_call, chat_tools, legacy_call
from leyden.services.gateway.dialects.hosted import without_hosted
from leyden.services.gateway.dialects.openai import Chunks, answer_body
from leyden.services.gateway.errors import BadRequest

REMEDIES = {
    "audio": "this model reads and writes text",
    "web_search_options": "give the agent a search tool of its own",
}

StopText = Annotated[str, Field(max_length=1000)]
"""The empty one stops nothing."""
CONVERSATION = frozenset({"messages", "tools", "functions"})


class _Function(Wire):
    name: str
    arguments: str = ""


class _CustomCall(Wire):
    name: str
    input: str = ""


class _ToolCall(Wire):
    id: str = ""
    function: _Function | None = None
    custom: _CustomCall | None = None

    @model_validator(mode="after")
    def _it_calls_something(self) -> _ToolCall:
        if self.function is None and self.custom is None:
            raise ValueError("a tool call needs a function, or a custom tool")
        return self


class _Part(Wire):
    type: str
    text: str | None = None
    refusal: str | None = None


class _Message(Wire):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: _Function | None = None
    # No field of OpenAI's: agents send what they like.
    reasoning_content: Any = None


class _FunctionSpec(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    name: str = Field(min_length=1)


class _Tool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: str
    function: _FunctionSpec | None = None
    custom: _FunctionSpec | None = None

    @model_validator(mode="after")
    def _it_is_named(self) -> _Tool:
        if self.type in {"function", "custom"} and getattr(self, self.type) is None:
            raise ValueError(f"a tool of type {self.type} needs a {self.type}")
        return self


class _NamedFunction(Wire):
    type: Literal["function"]
    function: _FunctionSpec


class _NamedCustom(Wire):
    type: Literal["custom"]
    custom: _FunctionSpec


_NamedTool = _NamedFunction | _NamedCustom


class _Allowed(Wire):
    mode: Literal["auto", "required"]
    tools: list[_NamedTool] = Field(min_length=1)


class _AllowedTools(Wire):
    type: Literal["allowed_tools"]
    allowed_tools: _Allowed


class _StreamOptions(Wire):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _JsonSchema(Wire):
    definition: dict[str, Any] | None = Field(default=None, alias="schema")


class _ResponseFormat(Wire):
    type: str
    json_schema: _JsonSchema | None = None


class _Body(Wire):
    model: str = Field(max_length=1000)
    messages: list[_Message] = Field(min_length=1)
    tools: list[_Tool] | None = None
    tool_choice: Literal["none", "auto", "required", "any"] | _NamedTool | _AllowedTools | None = None
    functions: list[_FunctionSpec] | None = None
    function_call: Literal["none", "auto"] | _FunctionSpec | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: Integer | None = Field(default=None, ge=1, le=128)
    max_tokens: Integer | None = Field(default=None, ge=1)
    max_completion_tokens: Integer | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: Integer | None = Field(default=None, ge=-1, le=2**30)
    min_p: float | None = Field(default=None, ge=0, le=1)
    min_tokens: Integer | None = Field(default=None, ge=0, le=2**30)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    # OpenAI's limit is 4; DeepSeek's and Anthropic's are 16.
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    seed: Integer | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    logprobs: bool | None = None
    top_logprobs: Integer | None = Field(default=None, ge=0, le=20)
    response_format: _ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatCompletions(WireFormat):
    """The dialect of chat completions."""

    def parse(self, body: bytes, *, max_choices: int) -> ModelRequest:
        """Parses and validates a body.

        Raises: BadRequest: not JSON, a field is wrong, or the model cannot serve a field
        """
        document = read_object(body, param="messages")
        return parse_document(document, hashlib.sha256(body).digest(), max_choices=max_choices)

    def body(self, request: ModelRequest, completion: Completion) -> Json:
        """Returns a `chat.completion` object."""
        wire = request.parameters.get("wire_tools", {})
        choices = [
            {
                "index": answer.index,
                "message": _message(answer.turn, wire),
                "logprobs": _logprobs(answer.logprobs),
                "finish_reason": _finish(answer, wire),
            }
            for answer in completion.answers
        ]
        return answer_body("chat.completion", f"chatcmpl-{completion.request_id}", completion, choices)

    def stream(self, request: ModelRequest, request_id: str, created: int, _prompt_tokens: int) -> ChatCompletionChunks:
        """Returns a writer of `chat.completion.chunk` events."""
        return ChatCompletionChunks(request, f"chatcmpl-{request_id}", created)


def parse_document(document: Json, body_sha256: bytes, *, max_choices: int) -> ModelRequest:
    """Validates a body that was read. Raises: BadRequest."""
    parsed = validated(_Body, document, REMEDIES)
    _refuse_unsupported(parsed, max_choices)
    given, marks = chat_tools(document.get("tools") or (), document.get("functions") or ())
    offered, hosted = without_hosted(given, {"function"})
    tools = tuple(map(Tool, offered))
    choice = parsed.function_call if parsed.tool_choice is None else parsed.tool_choice
    return ModelRequest(
        dialect=Dialect.CHAT_COMPLETIONS,
        model=parsed.model,
        turns=tuple(_turn(message, index) for index, message in enumerate(parsed.messages)),
        tools=tools,
        parses_tool_calls=bool(tools) and choice != "none",
        # An answer has one `function_call`.
        parallel_tool_calls=parsed.parallel_tool_calls is not False and not parsed.functions,
        stream=bool(parsed.stream),
        include_usage=parsed.stream_options is not None and bool(parsed.stream_options.include_usage),
        choices=parsed.n or 1,
        logprobs=bool(parsed.logprobs),
        top_logprobs=parsed.top_logprobs or 0,
        sampling=_sampling(parsed),
        template_options=parsed.chat_template_kwargs or {},
        parameters={name: value for name, value in document.items() if name not in CONVERSATION} | hosted | marks,
        body_sha256=body_sha256,
        answer_schema=_schema(parsed.response_format),
        required_tools=_required(choice, tools),
    )


class ChatCompletionChunks(Chunks):
    """The chunks of one stream; the first one of each choice names the role."""

    kind = "chat.completion.chunk"

    def __init__(self, request: ModelRequest, answer_id: str, created: int) -> None:
        super().__init__(request, answer_id, created)
        self._started: set[int] = set()

    def reasoning(self, index: int, text: str) -> bytes:
        """Encodes one chunk with reasoning; the log-probabilities of its tokens come with the first text."""
        return self._chunk(index, {"reasoning_content": text}, None)

    def text(self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None) -> bytes:
        """Encodes one chunk with text."""
        return self._chunk(index, {"content": text}, logprobs)

    def rest(self, answer: Answer, text: str, logprobs: Sequence[TokenLogprob] | None) -> bytes:
        """Encodes a chunk with the rest of the text and one for each tool call; no bytes where there are neither.

        Some clients read only the first tool call of a chunk.
        """
        wire = self._request.parameters.get("wire_tools", {})
        deltas: list[Json] = [{"content": text}] if text else []
        if (legacy := legacy_call(answer.turn.tool_calls, wire)) is not None:
            deltas.append({"function_call": legacy})
        else:
            for index, call in enumerate(answer.turn.tool_calls):
                deltas.append({"tool_calls": [{"index": index, **chat_call(call, wire)}]})
        if not deltas and not logprobs and answer.index in self._started:
            return b""
        first, *others = deltas or [{}]
        chunks = [self._chunk(answer.index, first, logprobs)]
        return b"".join([*chunks, *(self._chunk(answer.index, delta, None) for delta in others)])

    def _chunk(self, index: int, delta: Json, logprobs: Sequence[TokenLogprob] | None) -> bytes:
        if index not in self._started:
            self._started.add(index)
            delta = {"role": "assistant", **delta}
        return self._encode(_choice(index, delta, logprobs, None))

    def _ended(self, answer: Answer) -> Json:
        finish_reason = _finish(answer, self._request.parameters.get("wire_tools", {}))
        return _choice(answer.index, {}, None, finish_reason)


def _finish(answer: Answer, wire: WireTools) -> str:
    is_legacy = answer.finish_reason == "tool_calls" and legacy_call(answer.turn.tool_calls, wire) is not None
    return "function_call" if is_legacy else answer.finish_reason


def _refuse_unsupported(body: _Body, max_choices: int) -> None:
    if (body.n or 1) > max_choices:
        raise BadRequest(f"n must be at most {max_choices}.", param="n", code="invalid_value")
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs needs 'logprobs': true.", param="top_logprobs", code="invalid_value")


def _schema(form: _ResponseFormat | None) -> Json | None:
    if form is None:
        return None
    schema = form.json_schema.definition if form.json_schema else None
    return answer_schema(form.type, schema, param="response_format", place="response_format.json_schema.schema")


def _required(
    choice: str | _NamedTool | _AllowedTools | _FunctionSpec | None, tools: Sequence[Tool]
) -> tuple[str, ...]:
    if choice in ("required", "any"):
        return required_tools(tools, None)
    if isinstance(choice, _FunctionSpec):
        return required_tools(tools, [choice.name], param="function_call")
    if isinstance(choice, _NamedTool):
        return required_tools(tools, [_named(choice)])
    if isinstance(choice, _AllowedTools) and choice.allowed_tools.mode == "required":
        return required_tools(tools, list(map(_named, choice.allowed_tools.tools)))
    return ()


def _named(choice: _NamedTool) -> str:
    return choice.custom.name if isinstance(choice, _NamedCustom) else choice.function.name


def _sampling(body: _Body) -> Sampling:
    stop = tuple(filter(None, (body.stop,) if isinstance(body.stop, str) else body.stop or ()))
    return Sampling(
        temperature=body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        # Clients send 0 or -1 for "no top-k limit"; SGLang expects -1.
        top_k=body.top_k if body.top_k else -1,
        min_p=body.min_p or 0.0,
        min_tokens=body.min_tokens or 0,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        logit_bias=body.logit_bias or {},
        stop=stop,
        seed=body.seed,
        max_tokens=body.max_completion_tokens or body.max_tokens,
    )


def _turn(message: _Message, index: int) -> Turn:
    if message.role == "user" and message.content is None:
        raise BadRequest(
            f"messages.{index}.content must not be null.", param=f"messages.{index}.content", code="invalid_value"
        )
    calls = tuple(map(_called, message.tool_calls or ()))
    if message.function_call is not None and not calls:
        calls = (ToolCall(_legacy_id(index), message.function_call.name, message.function_call.arguments),)
    if message.role == "function":
        return Turn("tool", _text(message.content, index), name=message.name, tool_call_id=_legacy_id(index - 1))
    reasoning = message.reasoning_content if message.role == "assistant" else None
    return Turn(
        role="system" if message.role == "developer" else message.role,
        content=_text(message.content, index),
        name=message.name,
        tool_calls=calls if message.role == "assistant" else (),
        tool_call_id=message.tool_call_id,
        reasoning=reasoning if isinstance(reasoning, str) else None,
    )


def _legacy_id(index: int) -> str:
    """Returns the id of the call in this message: a `function_call` has none, and its result follows it."""
    return f"call_{index}"


def _called(call: _ToolCall) -> ToolCall:
    if call.custom is not None:
        return ToolCall(call.id, call.custom.name, arguments_of(call.custom.input))
    assert call.function is not None
    return ToolCall(call.id, call.function.name, call.function.arguments)


def _text(content: str | list[_Part] | None, index: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in {"text", "refusal"} or text is None:
            raise BadRequest(
                f"messages.{index} has a content part of type '{part.type}': this model reads text parts only.",
                param=f"messages.{index}.content",
                code="unsupported_content",
            )
        texts.append(text)
    return "\n".join(texts)


def _message(turn: Turn, wire: WireTools) -> Json:
    message: Json = {
        "role": "assistant",
        "content": turn.content or (None if turn.tool_calls else ""),
        "refusal": None,
    }
    if turn.reasoning is not None:
        message["reasoning_content"] = turn.reasoning
    if (legacy := legacy_call(turn.tool_calls, wire)) is not None:
        message["function_call"] = legacy
    elif turn.tool_calls:
        message["tool_calls"] = [chat_call(call, wire) for call in turn.tool_calls]
    return message


def _choice(index: int, delta: Json, logprobs: Sequence[TokenLogprob] | None, finish_reason: str | None) -> Json:
    return {"index": index, "delta": delta, "logprobs": _logprobs(logprobs), "finish_reason": finish_reason}


def _logprobs(logprobs: Sequence[TokenLogprob] | None) -> Json | None:
    return None if logprobs is None else {"content": logprobs_of(logprobs), "refusal": None}


def logprobs_of(logprobs: Sequence[TokenLogprob]) -> list[Json]:
    """Returns a text's tokens with their log-probabilities, and those of the likeliest tokens in their places."""
    return [{**_token(entry), "top_logprobs": list(map(_token, entry.top))} for entry in logprobs]


def _token(entry: TokenLogprob) -> Json:
    return {"token": entry.text, "logprob": entry.logprob, "bytes": list(entry.text.encode())}
