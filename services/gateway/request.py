"""What a chat completion asks for: the body validated once, then plain frozen data.

Three kinds of parameters: those that are served; those that change nothing here and are accepted and recorded
(`RECORDED`); and all others, refused by name. A parameter that changes the distribution in a way the trainer does not
reproduce is served, and named by `Sampling.untrainable_reason`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from leyden.libs.contracts.conversation import Json as Json
from leyden.libs.contracts.conversation import ToolCall as ToolCall
from leyden.libs.contracts.conversation import Turn as Turn
from leyden.libs.contracts.strict import MAX_DEPTH, has_more_values, is_too_deep
from leyden.libs.store.calls import storable_json
from leyden.services.gateway.errors import BadRequest
from leyden.services.gateway.opening import NotCut, Opening, Pieces, count_values, cut, settle
from leyden.services.gateway.sent import Sent, sent_of

RECORDED = frozenset(
    {
        "user", "metadata", "store", "service_tier", "reasoning", "reasoning_effort", "verbosity", "include",
        "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "safety_identifier", "prediction",
        "context_management", "thinking", "modalities", "moderation",
    }
)  # fmt: skip
"""Fields of OpenAI's API that agents send and that do not change how this model samples text."""

REMEDIES = {
    "functions": "send `tools` instead of the deprecated `functions`",
    "function_call": "send `tool_choice` instead of the deprecated `function_call`",
    "audio": "this model reads and writes text",
    "web_search_options": "give the agent a search tool of its own",
}

MAX_VALUES = 100_000
"""Objects, arrays and commas of a body. Reading more would hold up everybody else's calls: 16 MiB of them take 20 s."""

GREEDY_BELOW = 1e-6
"""Temperatures that engines take for 0 (SGLang's own bound)."""

StopText = Annotated[str, Field(min_length=1, max_length=1000)]


class _Wire(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class _Function(_Wire):
    name: str
    arguments: str = ""


class _ToolCall(_Wire):
    id: str = ""
    function: _Function


class _Part(_Wire):
    type: str
    text: str | None = None
    refusal: str | None = None


class _Message(_Wire):
    # Agents echo answers with fields of their own (`provider_specific_fields`, `refusal`): messages ignore what they do
    # not know, the body does not.
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None


class _FunctionSpec(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    name: str = Field(min_length=1)


class _Tool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["function"]
    function: _FunctionSpec


class _NamedTool(_Wire):
    type: Literal["function"]
    function: _FunctionSpec


class _StreamOptions(_Wire):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _ResponseFormat(_Wire):
    type: str


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    model: str = Field(max_length=1000)
    messages: list[_Message] = Field(min_length=1)
    tools: list[_Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | _NamedTool | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=128)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=2**30)
    min_p: float | None = Field(default=None, ge=0, le=1)
    min_tokens: int | None = Field(default=None, ge=0, le=2**30)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=4)] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    response_format: _ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. `temperature` and `max_tokens` are None where the body names none."""

    temperature: float | None = None
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    min_tokens: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Json = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    seed: int | None = None
    max_tokens: int | None = None

    def untrainable_reason(self, temperature: float) -> str | None:
        """The parameters under which the recorded log-probabilities are not the policy's own; None when it can train.

        Args: temperature: the effective one; about 0 takes the likeliest token, which is no sample of the policy.
        """
        changed = {
            "temperature": temperature < GREEDY_BELOW,
            "top_p": self.top_p != 1.0,
            "top_k": self.top_k > 0,
            "min_p": self.min_p > 0,
            "min_tokens": self.min_tokens > 0,
            "frequency_penalty": self.frequency_penalty != 0,
            "presence_penalty": self.presence_penalty != 0,
            "repetition_penalty": self.repetition_penalty != 1.0,
            "logit_bias": bool(self.logit_bias),
        }
        names = [name for name, is_changed in changed.items() if is_changed]
        return f"sampled with {', '.join(names)}" if names else None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A validated chat completion.

    `recorded` is the body without messages and tools, which are `sent`. `calls_tools` is whether sampled text is
    searched for tool calls. `continues` is the opening whose turns come first, `opening` the one that later bodies may
    continue; None where there is none.
    """

    model: str
    turns: tuple[Turn, ...]
    tools: tuple[Json, ...]
    calls_tools: bool
    parallel_tool_calls: bool
    stream: bool
    include_usage: bool
    choices: int
    logprobs: bool
    top_logprobs: int
    sampling: Sampling
    template_options: Json
    recorded: Json
    sent: Sent
    body_sha256: bytes
    continues: Opening | None = None
    opening: Opening | None = None


def parse_request(body: bytes, *, max_choices: int, opening: Opening | None = None) -> ChatRequest:
    """The request that a body asks for, the same with and without an opening.

    Args: opening: the body begins with its bytes
    Raises: BadRequest: not JSON, a field is wrong or unknown, or something is asked that this model cannot serve
    """
    known = 0 if opening is None else len(opening.raw)
    values = count_values(body, known) + (0 if opening is None else opening.values)
    if values <= MAX_VALUES:
        try:
            return _parse_pieces(body, cut(body, opening), opening, max_choices)
        except (NotCut, BadRequest):
            # Parsed as a whole it is told what is wrong, in its words and with its places.
            pass
    return _parse_whole(body, max_choices)


def _parse_pieces(body: bytes, pieces: Pieces, opening: Opening | None, max_choices: int) -> ChatRequest:
    document, first = pieces.document, 0 if opening is None else len(opening.turns)
    parsed = _checked(document, max_choices)
    turns = tuple(_turn(message, index) for index, message in enumerate(parsed.messages, start=first))
    if opening is not None:
        turns = (*opening.turns, *turns)
    settled, upto_messages = settle(body, pieces, opening, turns)
    sent = sent_of(body, pieces, settled, storable_json(document.get("tools")), upto_messages)
    upto_messages.update(body[pieces.messages_end :])
    return _request(document, parsed, turns, sent, upto_messages.digest(), opening, settled)


def _parse_whole(body: bytes, max_choices: int) -> ChatRequest:
    if has_more_values(body, MAX_VALUES):
        message = f"The body has more than {MAX_VALUES} values: send fewer messages."
        raise BadRequest(message, param="messages", code="too_many_values")
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"The body is not valid JSON: {error}.", code="invalid_json") from error
    if not isinstance(document, dict):
        raise BadRequest("The body must be a JSON object.", code="invalid_json")
    parsed = _checked(document, max_choices)
    turns = tuple(_turn(message, index) for index, message in enumerate(parsed.messages))
    sent = Sent(storable_json(document["messages"])[1:-1], storable_json(document.get("tools")))
    return _request(document, parsed, turns, sent, hashlib.sha256(body).digest())


def _checked(document: Json, max_choices: int) -> _Body:
    if is_too_deep(document):
        raise BadRequest(f"The body is nested deeper than {MAX_DEPTH} levels: flatten it.", code="invalid_json")
    parsed = _validated(document)
    _refuse_unsupported(parsed, max_choices)
    return parsed


def _request(
    document: Json,
    parsed: _Body,
    turns: tuple[Turn, ...],
    sent: Sent,
    body_sha256: bytes,
    continues: Opening | None = None,
    opening: Opening | None = None,
) -> ChatRequest:
    return ChatRequest(
        model=parsed.model,
        turns=turns,
        tools=tuple(document.get("tools") or ()),
        calls_tools=bool(parsed.tools) and parsed.tool_choice != "none",
        parallel_tool_calls=parsed.parallel_tool_calls is not False,
        stream=bool(parsed.stream),
        include_usage=parsed.stream_options is not None and bool(parsed.stream_options.include_usage),
        choices=parsed.n or 1,
        logprobs=bool(parsed.logprobs),
        top_logprobs=parsed.top_logprobs or 0,
        sampling=_sampling(parsed),
        template_options=parsed.chat_template_kwargs or {},
        recorded={name: value for name, value in document.items() if name not in {"messages", "tools"}},
        sent=sent,
        body_sha256=body_sha256,
        continues=continues,
        opening=opening,
    )


def body_schema(ref_template: str) -> Json:
    """JSON Schema of a body; fields of `RECORDED` may stand beside it.

    Args: ref_template: where the parts in `$defs` will be found, such as `#/components/schemas/{model}`
    """
    schema = _Body.model_json_schema(ref_template=ref_template)
    schema["properties"] |= {name: {} for name in sorted(RECORDED)}
    return schema


def parse_conversation(conversation: Json) -> tuple[tuple[Turn, ...], tuple[Json, ...]]:
    """Turns and tools of `{messages, tools}`."""
    messages = [_Message.model_validate(message) for message in conversation["messages"]]
    turns = tuple(_turn(message, index) for index, message in enumerate(messages))
    return turns, tuple(conversation.get("tools") or ())


def parse_answer(response: Json) -> Turn:
    """The assistant's turn out of an answer."""
    return _turn(_Message.model_validate(response), 0)


def _validated(document: Json) -> _Body:
    # Null means unset; fields that change nothing here are recorded and not looked at.
    known = {name: value for name, value in document.items() if value is not None and name not in RECORDED}
    try:
        return _Body.model_validate(known)
    except ValidationError as error:
        raise _bad_request(error) from error


def _bad_request(error: ValidationError) -> BadRequest:
    first = error.errors(include_url=False, include_input=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        remedy = REMEDIES.get(path, "remove it")
        return BadRequest(
            f"Unrecognized request argument supplied: {path}; {remedy}.", param=path, code="unknown_parameter"
        )
    if first["type"] == "missing":
        return BadRequest(f"Missing required parameter: '{path}'.", param=path, code="missing_required_parameter")
    return BadRequest(f"Invalid value for '{path}': {first['msg']}.", param=path, code="invalid_value")


def _refuse_unsupported(body: _Body, max_choices: int) -> None:
    if body.response_format is not None and body.response_format.type != "text":
        raise BadRequest(
            f"response_format '{body.response_format.type}' is not supported: constrained sampling cannot be trained."
            " Ask for the format in the prompt, or give a tool whose parameters are the schema.",
            param="response_format",
            code="unsupported_parameter",
        )
    if (body.n or 1) > max_choices:
        raise BadRequest(f"n must be at most {max_choices}.", param="n", code="invalid_value")
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs needs 'logprobs': true.", param="top_logprobs", code="invalid_value")


def _sampling(body: _Body) -> Sampling:
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return Sampling(
        temperature=body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        # 0 and -1 both say "all of the vocabulary".
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
    calls = tuple(ToolCall(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ())
    return Turn(
        role="system" if message.role == "developer" else message.role,
        content=_text(message.content, index),
        name=message.name,
        tool_calls=calls if message.role == "assistant" else (),
        tool_call_id=message.tool_call_id,
    )


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


def parsed_arguments(arguments: str) -> object:
    """The arguments as a JSON value, or the text itself where it is none: two spellings of a value compare equal."""
    try:
        value: object = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return arguments if is_too_deep(value) or not is_unicode(arguments, value) else value


def is_unicode(text: str, value: object) -> bool:
    r"""Whether a value read from a JSON text can be written again: `\ud800` is JSON, but no character.

    >>> is_unicode('["\\ud800"]', ["\ud800"])
    False
    """
    if "\\ud" not in text.lower():
        return True
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
