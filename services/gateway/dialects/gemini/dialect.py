"""Gemini's `generateContent` and `streamGenerateContent`, validated, answered in one body or as a stream of chunks.

The path has the model and says whether to stream. Fields that do not change how this model samples text are recorded
and have no other effect, safety settings among them. The dialect refuses what it cannot serve by name: media, cached
contents, answers other than text, tools that the agent runs and whose schema only Google's models know.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from leyden.libs.contracts.conversation import Dialect, Json, Tool, Turn
from leyden.services.gateway.calls.context import Completion, ModelRequest, Sampling
from leyden.services.gateway.dialects.base import WireFormat
from leyden.services.gateway.dialects.body import Integer, read_object, required_tools, validated
from leyden.services.gateway.dialects.chat_completions import StopText
from leyden.services.gateway.dialects.gemini.answers import answer_body, error_of
from leyden.services.gateway.dialects.gemini.chunks import Chunks, Form
from leyden.services.gateway.dialects.gemini.contents import Content, text_of, turns_of
from leyden.services.gateway.dialects.gemini.schema import json_schema
from leyden.services.gateway.dialects.gemini.wire import Proto
from leyden.services.gateway.dialects.hosted import without_hosted
from leyden.services.gateway.errors import BadRequest, GatewayError
from leyden.services.gateway.schemas import check_schema

CONVERSATION = frozenset({"contents", "systemInstruction", "system_instruction", "tools"})
COUNTED = "generateContentRequest", "generate_content_request"
"""Names of a complete request in the body of `countTokens`."""
MAX_MODEL_LENGTH = 1000


class _FunctionDeclaration(Proto):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    parameters_json_schema: dict[str, Any] | None = None


class _Tool(Proto):
    model_config = ConfigDict(extra="allow")
    function_declarations: list[_FunctionDeclaration] | None = None


class _FunctionCallingConfig(Proto):
    mode: Literal["MODE_UNSPECIFIED", "AUTO", "ANY", "NONE", "VALIDATED"] | None = None
    allowed_function_names: list[str] | None = None


class _ToolConfig(Proto):
    function_calling_config: _FunctionCallingConfig | None = None


class _ThinkingConfig(Proto):
    include_thoughts: bool | None = None
    thinking_budget: Integer | None = None
    thinking_level: str | None = None


class _GenerationConfig(Proto):
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: Integer | None = Field(default=None, ge=-1, le=2**30)
    candidate_count: Integer | None = Field(default=None, ge=1, le=128)
    max_output_tokens: Integer | None = Field(default=None, ge=1)
    stop_sequences: Annotated[list[StopText], Field(max_length=16)] | None = None
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    seed: Integer | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    response_mime_type: str | None = None
    response_schema: dict[str, Any] | None = None
    response_json_schema: dict[str, Any] | None = None
    response_modalities: list[str] | None = None
    response_logprobs: bool | None = None
    logprobs: Integer | None = Field(default=None, ge=0, le=20)
    thinking_config: _ThinkingConfig | None = None


class _Body(Proto):
    contents: list[Content] = Field(min_length=1)
    system_instruction: Content | None = None
    tools: list[_Tool] | None = None
    tool_config: _ToolConfig | None = None
    generation_config: _GenerationConfig | None = None
    cached_content: str | None = None


class Gemini(WireFormat):
    """The dialect of Gemini, for one request.

    Args: model: of the path; form: of the stream that the path asks for, None for one body
    """

    def __init__(self, model: str, form: Form | None = None) -> None:
        self._model = model
        self._form: Form | None = form
        self.stream_type = "text/event-stream" if form == "events" else "application/json"

    def parse(self, body: bytes, *, max_choices: int) -> ModelRequest:
        """Parses and validates a body.

        Raises: BadRequest: not JSON, a field is wrong, or the model cannot serve a field
        """
        if len(self._model) > MAX_MODEL_LENGTH:
            raise BadRequest(f"The model's name has more than {MAX_MODEL_LENGTH} characters.", code="invalid_value")
        document = _counted(read_object(body, param="contents"))
        parsed = validated(_Body, document, {})
        config = parsed.generation_config or _GenerationConfig()
        _refuse_unsupported(parsed, config, max_choices)
        offered, hosted = without_hosted(list(_tools(parsed.tools or ())), {"function"})
        tools = tuple(map(Tool, offered))
        thinks = _template_options(config.thinking_config)
        parameters = {name: value for name, value in document.items() if name not in CONVERSATION}
        calling = (parsed.tool_config and parsed.tool_config.function_calling_config) or _FunctionCallingConfig()
        return ModelRequest(
            dialect=Dialect.GEMINI,
            model=self._model,
            turns=tuple(_turns(parsed)),
            tools=tools,
            parses_tool_calls=bool(tools) and calling.mode != "NONE",
            parallel_tool_calls=True,
            stream=self._form is not None,
            include_usage=True,
            choices=config.candidate_count or 1,
            logprobs=bool(config.response_logprobs),
            top_logprobs=(config.logprobs or 0) if config.response_logprobs else 0,
            sampling=_sampling(config),
            template_options=thinks,
            parameters=parameters
            | {"model": self._model, "stream": self._form is not None}
            | hosted
            | ({"chat_template_kwargs": thinks} if thinks else {}),
            # The body alone does not name the model.
            body_sha256=hashlib.sha256(f"{self._model}\n".encode("utf-8", "surrogatepass") + body).digest(),
            answer_schema=_schema(config),
            required_tools=_required(calling, tools),
            asks_for_reasoning=bool(config.thinking_config and config.thinking_config.include_thoughts),
        )

    def body(self, request: ModelRequest, completion: Completion) -> Json:
        """Returns a `GenerateContentResponse`."""
        return answer_body(completion, shows_thoughts=request.asks_for_reasoning)

    def stream(self, request: ModelRequest, request_id: str, _created: int, _prompt_tokens: int) -> Chunks:
        """Returns a writer of chunks, each a `GenerateContentResponse`."""
        return Chunks(request, request_id, self._form or "events")

    def error(self, error: GatewayError) -> Json:
        """Returns Google's error object."""
        return error_of(error)


def _counted(document: Json) -> Json:
    """The complete request in the body of `countTokens`, or the body, which may be a part of one."""
    inner = next((document[name] for name in COUNTED if name in document), document)
    return inner if isinstance(inner, dict) else document


def _refuse_unsupported(body: _Body, config: _GenerationConfig, max_choices: int) -> None:
    if body.cached_content is not None:
        message = "cachedContent is not supported: send the contents; the engine keeps what it read of them."
        raise BadRequest(message, param="cachedContent", code="unsupported_parameter")
    if body.contents[-1].role == "model":
        message = "contents: the last one must be the user's or a function's response, not the model's."
        raise BadRequest(message, param="contents", code="unsupported_content")
    if (config.candidate_count or 1) > max_choices:
        name = "generationConfig.candidateCount"
        raise BadRequest(f"{name} must be at most {max_choices}.", param=name, code="invalid_value")
    if config.response_modalities and "TEXT" not in config.response_modalities:
        name = "generationConfig.responseModalities"
        raise BadRequest(f"{name}: this model writes TEXT.", param=name, code="unsupported_parameter")


def _turns(body: _Body) -> Iterator[Turn]:
    if body.system_instruction and (system := text_of(body.system_instruction, "systemInstruction")):
        yield Turn("system", system)
    yield from turns_of(body.contents)


def _tools(tools: Sequence[_Tool]) -> Iterator[Json]:
    """Functions in the form of chat templates, and Google's own tools by their names."""
    for tool in tools:
        for declared in tool.function_declarations or ():
            parameters = declared.parameters_json_schema
            if parameters is None:
                parameters = json_schema(declared.parameters or {"type": "OBJECT", "properties": {}})
            described = {} if declared.description is None else {"description": declared.description}
            yield {"type": "function", "function": {"name": declared.name, **described, "parameters": parameters}}
        for name, value in (tool.model_extra or {}).items():
            if value is not None:
                yield {"type": name}


def _required(calling: _FunctionCallingConfig, tools: Sequence[Tool]) -> tuple[str, ...]:
    if calling.mode != "ANY":
        return ()
    return required_tools(tools, calling.allowed_function_names or None, param="toolConfig.functionCallingConfig")


def _template_options(thinking: _ThinkingConfig | None) -> Json:
    if thinking is None:
        return {}
    if thinking.thinking_budget is not None:
        return {"enable_thinking": thinking.thinking_budget != 0}
    return {"enable_thinking": True} if thinking.include_thoughts or thinking.thinking_level else {}


def _schema(config: _GenerationConfig) -> Json | None:
    schema, name = config.response_json_schema, "generationConfig.responseJsonSchema"
    if schema is None and config.response_schema is not None:
        schema, name = json_schema(config.response_schema), "generationConfig.responseSchema"
    if schema is not None:
        check_schema(schema, name)
        return schema
    return {"type": "object"} if config.response_mime_type == "application/json" else None


def _sampling(config: _GenerationConfig) -> Sampling:
    return Sampling(
        temperature=config.temperature,
        top_p=1.0 if config.top_p is None else config.top_p,
        top_k=config.top_k or -1,
        frequency_penalty=config.frequency_penalty or 0.0,
        presence_penalty=config.presence_penalty or 0.0,
        stop=tuple(filter(None, config.stop_sequences or ())),
        seed=config.seed,
        max_tokens=config.max_output_tokens,
    )
