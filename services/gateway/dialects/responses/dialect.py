"""Responses: OpenAI's `POST /v1/responses`, answered in one body or as a stream of typed events.

`previous_response_id`, `conversation` and item references are expanded from what the attempt has stored, so that a
later prompt continues the tokens of the call that it refers to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field

from leyden.libs.contracts.conversation import Dialect, Json, Tool, Turn
from leyden.services.gateway.calls.context import Answer, Attempt, Completion, ModelRequest, Sampling, TokenLogprob
from leyden.services.gateway.dialects.base import COMMENT, WireFormat
from leyden.services.gateway.dialects.body import Integer, Wire, answer_schema, read_object, required_tools, validated
from leyden.services.gateway.dialects.chat_completions import logprobs_of
from leyden.services.gateway.dialects.hosted import without_hosted
from leyden.services.gateway.dialects.responses.items import (
    NO_TOOLS,
    Item,
    ObjectId,
    call_of,
    items_of,
    message_item,
    reasoning_item,
    reasoning_part,
    stored_items,
    text_part,
    turns_of,
)
from leyden.services.gateway.dialects.responses.tools import functions, wire_tools
from leyden.services.gateway.errors import BadRequest, GatewayError, NotServed
from leyden.services.gateway.prompt.stored import StoredAnswer, StoredCalls
from leyden.services.gateway.records.agent_objects import AgentObjects

REMEDIES = {
    "prompt": "send `instructions` and `input`",
    "messages": "send `input`",
    "max_tokens": "send `max_output_tokens`",
}
T = TypeVar("T")
LOGPROBS = "message.output_text.logprobs"


class _Tool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: str
    name: str | None = Field(default=None, min_length=1)
    tools: list[_Tool] | None = None


class _Named(Wire):
    name: str | None = None


class _ToolChoice(_Named):
    type: str
    mode: Literal["auto", "required"] = "auto"
    tools: list[_Named] = Field(default_factory=list)


class _Format(Wire):
    type: str
    definition: dict[str, Any] | None = Field(default=None, alias="schema")


class _Text(Wire):
    format: _Format | None = None


class _Conversation(Wire):
    id: ObjectId


class _Tools(Wire):
    tools: list[_Tool] = Field(default_factory=list)


class _Body(Wire):
    model: str = Field(max_length=1000)
    input: str | list[Item] = Field(default_factory=list)
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: ObjectId | _Conversation | None = None
    tools: list[_Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | _ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    background: bool | None = None
    store: bool | None = None
    max_output_tokens: Integer | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_logprobs: Integer | None = Field(default=None, ge=0, le=20)
    include: list[str] | None = None
    metadata: dict[str, Annotated[str, Field(max_length=512)]] | None = Field(default=None, max_length=16)
    truncation: Literal["auto", "disabled"] | None = None
    text: _Text | None = None
    chat_template_kwargs: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ResponsesRequest(ModelRequest):
    """A request whose `turns` come from `items` and from what they and `parameters` refer to."""

    items: tuple[Item, ...]


class Responses(WireFormat):
    """The dialect of responses."""

    def __init__(self, calls: StoredCalls, objects: AgentObjects) -> None:
        self._calls = calls
        self._objects = objects

    def parse(self, body: bytes, *, max_choices: int) -> ResponsesRequest:
        """Parses and validates a body.

        Raises: BadRequest: not JSON, a field is wrong, or the model cannot serve a field
        """
        document = read_object(body, param="input")
        parsed = validated(_Body, document, REMEDIES)
        _refuse_unsupported(parsed)
        sent = parsed.input
        items = [Item(role="user", content=sent)] if isinstance(sent, str) else sent
        given: list[Json] = [*(document.get("tools") or ()), *(tool for item in items for tool in item.tools or ())]
        _check_names(validated(_Tools, {"tools": given}, {}).tools, "tools")
        offered, marks = without_hosted(list(functions(given)), {"function"})
        tools = tuple(map(_neutral_tool, offered))
        if wire := wire_tools(given):
            marks["wire_tools"] = wire
        if hosted := [item.kind for item in items if item.is_hosted]:
            marks["hosted_items"] = hosted
        return ResponsesRequest(
            dialect=Dialect.RESPONSES,
            model=parsed.model,
            turns=(),
            tools=tools,
            parses_tool_calls=bool(tools) and parsed.tool_choice != "none",
            parallel_tool_calls=parsed.parallel_tool_calls is not False,
            stream=bool(parsed.stream),
            include_usage=True,
            choices=1,
            logprobs=LOGPROBS in (parsed.include or ()),
            top_logprobs=parsed.top_logprobs or 0,
            sampling=Sampling(
                temperature=parsed.temperature,
                top_p=1.0 if parsed.top_p is None else parsed.top_p,
                max_tokens=parsed.max_output_tokens,
            ),
            template_options=parsed.chat_template_kwargs or {},
            parameters={name: value for name, value in document.items() if name not in {"input", "tools"}} | marks,
            body_sha256=hashlib.sha256(body).digest(),
            answer_schema=_schema(parsed.text),
            required_tools=_required(parsed.tool_choice, tools),
            items=tuple(items),
        )

    async def expand(self, attempt: Attempt, request: ModelRequest) -> ModelRequest:
        """Returns the request with its turns: instructions, those of the previous response, and its items.

        Raises: NotServed: an id is unknown to this attempt; BadRequest: the items are no conversation
        """
        assert isinstance(request, ResponsesRequest)
        earlier: Sequence[Turn] = ()
        if (previous := request.parameters.get("previous_response_id")) is not None:
            earlier = _turns_after(await self.stored(attempt, previous, param="previous_response_id"))
        if (conversation := _conversation_id(request)) is not None:
            documents = await self.conversation(attempt, conversation)
            earlier = turns_of([Item.model_validate(one) for one in documents[1:]])
        turns = turns_of(await self._resolved(attempt, request.items), earlier)
        if not turns:
            raise BadRequest("Missing required parameter: 'input'.", param="input", code="missing_required_parameter")
        if instructions := request.parameters.get("instructions"):
            turns = (Turn("system", instructions), *turns)
        return replace(request, turns=turns)

    async def remember(self, attempt: Attempt, request: ModelRequest, completion: Completion) -> None:
        """Appends the request's items and the answer's to their conversation."""
        assert isinstance(request, ResponsesRequest)
        if (conversation := _conversation_id(request)) is not None:
            documents = stored_items(await self._resolved(attempt, request.items), completion.request_id)
            [answer] = completion.answers
            documents |= {item["id"]: item for item in _output(completion.request_id, answer, request.parameters)}
            await self._objects.add(attempt.of_run, conversation, documents)

    def body(self, request: ModelRequest, completion: Completion) -> Json:
        """Returns a `response` object."""
        return response_of(request.parameters, request.tools, completion)

    def stream(self, request: ModelRequest, request_id: str, created: int, _prompt_tokens: int) -> ResponseEvents:
        """Returns a writer of the events of a response."""
        return ResponseEvents(request, request_id, created)

    async def stored(self, attempt: Attempt, response_id: str, *, param: str = "response_id") -> StoredAnswer:
        """Returns a response of this attempt. Raises: NotServed."""
        answers = await self._answers(attempt, {response_id})
        return found(answers.get(response_id), "response", response_id, param)

    async def conversation(self, attempt: Attempt, conversation_id: str) -> list[Json]:
        """Returns a conversation of this attempt, then its items. Raises: NotServed."""
        documents = await self._objects.owned(attempt.of_run, conversation_id)
        own = found(documents.pop(conversation_id, None), "conversation", conversation_id, "conversation")
        return [own, *documents.values()]

    async def _resolved(self, attempt: Attempt, items: Sequence[Item]) -> list[Item]:
        """Returns the items with those that references name in their place. Raises: NotServed."""
        ids = {item.id for item in items if item.kind == "item_reference" and item.id is not None}
        if not ids:
            return list(items)
        known = await self._objects.by_id(attempt.of_run, ids)
        for stored in (await self._answers(attempt, ids)).values():
            [answer] = stored.completion.answers
            output = _output(stored.completion.request_id, answer, stored.parameters)
            known |= {one["id"]: one for one in (*output, *input_items(stored))}
        return [
            Item.model_validate(found(known.get(item.id or ""), "item", item.id or "", "input"))
            if item.kind == "item_reference"
            else item
            for item in items
        ]

    async def _answers(self, attempt: Attempt, ids: Collection[str]) -> dict[str, StoredAnswer]:
        """Returns the stored answers that these ids of responses and items name."""
        calls = {name: call_id for name in ids if (call_id := call_of(name)) is not None}
        if not calls:
            return {}
        answers = await self._calls.answers(attempt, Dialect.RESPONSES, set(calls.values()))
        deleted = await self._objects.by_id(attempt.of_run, [f"resp_{call_id}" for call_id in calls.values()])
        stored = {
            answer.completion.request_id: answer
            for answer in answers
            if answer.parameters.get("store") is not False and f"resp_{answer.completion.request_id}" not in deleted
        }
        return {name: stored[call_id] for name, call_id in calls.items() if call_id in stored}


class ResponseEvents:
    """The events of one stream. Reasoning and message begin with their first text, a tool call when it is complete.

    Clients know an item by its place, and one ends before the next begins. Reasoning that follows a text, as that of
    gpt-oss may, comes as an item after the message; where reasoning came before, too, the complete response alone has
    it.
    """

    keepalive = COMMENT
    error_is_final = True

    def __init__(self, request: ModelRequest, request_id: str, created: int) -> None:
        self._request = request
        self._request_id = request_id
        self._created = created
        self._count = 0
        self._reasoning: str | None = None
        self._is_reasoning_open = False
        self._message_index: int | None = None

    def reasoning(self, _index: int, text: str) -> bytes:
        """Encodes a piece of the reasoning; no bytes after the beginning of the message."""
        return self._reasoned(text) if self._message_index is None else b""

    def text(self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None) -> bytes:
        """Encodes a piece of the message's text."""
        events = self._message_started()
        return events + self._part_event("output_text.delta", delta=text, logprobs=logprobs_of(logprobs or ()))

    def rest(self, answer: Answer, text: str, logprobs: Sequence[TokenLogprob] | None) -> bytes:
        """Encodes the rest of the text, the end of the message, and every tool call."""
        events = self._started()
        for index, item in enumerate(self._in_order(_output(self._request_id, answer, self._request.parameters))):
            match item["type"]:
                case "reasoning":
                    events += self._reasoned(item["content"][0]["text"]) if self._reasoning is None else b""
                    events += self._reasoning_done(item)
                case "message":
                    events += self.text(answer.index, text, logprobs) if text else self._message_started()
                    events += self._message_done(item)
                case _:
                    events += self._tool_call(index, item)
        return events

    def end(self, completion: Completion) -> bytes:
        """Encodes the event with the complete response."""
        response = response_of(self._request.parameters, self._request.tools, completion)
        response["output"] = self._in_order(response["output"])
        return self._event(response["status"], response=response)

    def error(self, error: GatewayError) -> bytes:
        """Encodes a failed response."""
        cause = {"code": "rate_limit_exceeded" if error.status == 429 else "server_error", "message": error.message}
        started = self._started()
        return started + self._event("failed", response=self._unfinished("failed", cause))

    def _started(self) -> bytes:
        if self._count:
            return b""
        response = self._unfinished("in_progress", None)
        return self._event("created", response=response) + self._event("in_progress", response=response)

    def _unfinished(self, status: str, error: Json | None) -> Json:
        return _document(
            self._request.parameters, self._request.tools, self._request_id, self._created, status, [], error=error
        )

    def _in_order(self, output: list[Json]) -> list[Json]:
        """Returns the items of an answer in the order in which they began."""
        return sorted(output, key=lambda item: item["type"] != "message") if self._message_index == 0 else output

    def _reasoned(self, text: str) -> bytes:
        events = self._started()
        if self._reasoning is None:
            self._reasoning, self._is_reasoning_open = "", True
            item = reasoning_item(self._request_id, "", "in_progress") | {"content": []}
            events += self._event("output_item.added", output_index=self._reasoning_index, item=item)
            events += self._reasoning_event("content_part.added", part=reasoning_part(""))
        self._reasoning += text
        return events + self._reasoning_event("reasoning_text.delta", delta=text)

    def _reasoning_done(self, item: Json) -> bytes:
        """Returns the end of the reasoning; no bytes where it was sent before."""
        if not self._is_reasoning_open:
            return b""
        self._is_reasoning_open = False
        [part] = item["content"]
        events = self._reasoning_event("reasoning_text.done", text=part["text"])
        events += self._reasoning_event("content_part.done", part=part)
        return events + self._event("output_item.done", output_index=self._reasoning_index, item=item)

    @property
    def _reasoning_index(self) -> int:
        return 1 if self._message_index == 0 else 0

    def _message_started(self) -> bytes:
        if self._message_index is not None:
            return b""
        events = self._started()
        if self._reasoning is not None:
            events += self._reasoning_done(reasoning_item(self._request_id, self._reasoning, "completed"))
        self._message_index = 0 if self._reasoning is None else 1
        item = message_item(self._request_id, "", None, "in_progress") | {"content": []}
        events += self._event("output_item.added", output_index=self._message_index, item=item)
        return events + self._part_event("content_part.added", part=text_part("", None))

    def _message_done(self, item: Json) -> bytes:
        [part] = item["content"]
        events = self._part_event("output_text.done", text=part["text"], logprobs=part["logprobs"])
        events += self._part_event("content_part.done", part=part)
        return events + self._event("output_item.done", output_index=self._message_index, item=item)

    def _tool_call(self, index: int, item: Json) -> bytes:
        place = {"output_index": index, "item_id": item["id"]}
        field = "input" if item["type"] == "custom_tool_call" else "arguments"
        kind = "custom_tool_call_input" if field == "input" else "function_call_arguments"
        done = {field: item[field]} if field == "input" else {"name": item["name"], field: item[field]}
        started = item | {field: "", "status": "in_progress"}
        return (
            self._event("output_item.added", output_index=index, item=started)
            + self._event(f"{kind}.delta", **place, delta=item[field])
            + self._event(f"{kind}.done", **place, **done)
            + self._event("output_item.done", output_index=index, item=item)
        )

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        place = {"item_id": f"msg_{self._request_id}", "output_index": self._message_index, "content_index": 0}
        return self._event(kind, **place, **fields)

    def _reasoning_event(self, kind: str, **fields: Any) -> bytes:
        place = {"item_id": f"rs_{self._request_id}", "output_index": self._reasoning_index, "content_index": 0}
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        name = f"response.{kind}"
        document = {"type": name, "sequence_number": self._count, **fields}
        self._count += 1
        return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(document) + b"\n\n"


def response_of(parameters: Json, tools: Sequence[Tool], completion: Completion) -> Json:
    """Returns the `response` object of a complete answer. Args: parameters, tools: those of its request."""
    [answer] = completion.answers
    is_cut = answer.finish_reason == "length"
    return _document(
        parameters,
        tools,
        completion.request_id,
        completion.created,
        "incomplete" if is_cut else "completed",
        _output(completion.request_id, answer, parameters),
        incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
        usage=usage_of(completion),
    )


def usage_of(completion: Completion) -> Json:
    """Returns the `usage` object of an answer; an unknown number of reasoning tokens is 0, because clients need one."""
    return {
        "input_tokens": completion.prompt_tokens,
        "input_tokens_details": {"cached_tokens": completion.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": completion.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": completion.reasoning_tokens or 0},
        "total_tokens": completion.prompt_tokens + completion.completion_tokens,
    }


def input_items(stored: StoredAnswer) -> list[Json]:
    """Returns the items of a stored response's conversation, without its instructions and its answer."""
    name, wire = stored.completion.request_id, stored.parameters.get("wire_tools", NO_TOOLS)
    turns = enumerate(_turns_before(stored))
    return [item for index, turn in turns for item in items_of(turn, f"{name}_i{index}", wire=wire)]


def _document(
    parameters: Json,
    tools: Sequence[Tool],
    request_id: str,
    created: int,
    status: str,
    output: list[Json],
    **outcome: Any,
) -> Json:
    sent = {name: value for name, value in parameters.items() if value is not None}
    conversation = sent.get("conversation")
    return {
        "id": f"resp_{request_id}",
        "object": "response",
        "created_at": created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": sent.get("instructions"),
        "max_output_tokens": sent.get("max_output_tokens"),
        "metadata": sent.get("metadata", {}),
        "model": sent["model"],
        "output": output,
        "parallel_tool_calls": sent.get("parallel_tool_calls", True),
        "previous_response_id": sent.get("previous_response_id"),
        "conversation": {"id": conversation} if isinstance(conversation, str) else conversation,
        "reasoning": sent.get("reasoning"),
        "store": sent.get("store", True),
        "temperature": sent.get("temperature"),
        "text": {"format": {"type": "text"}, **sent.get("text", {})},
        "tool_choice": sent.get("tool_choice", "auto"),
        "tools": list(map(_wire_tool, tools)),
        "top_logprobs": sent.get("top_logprobs", 0),
        "top_p": sent.get("top_p"),
        "truncation": sent.get("truncation", "disabled"),
        "usage": None,
        "user": sent.get("user"),
        **outcome,
    }


def _output(request_id: str, answer: Answer, parameters: Json) -> list[Json]:
    status = "incomplete" if answer.finish_reason == "length" else "completed"
    items = items_of(answer.turn, request_id, status=status, wire=parameters.get("wire_tools", NO_TOOLS))
    message = message_item(request_id, answer.turn.content, answer.logprobs, status)
    return [message if item["type"] == "message" else item for item in items]


def _refuse_unsupported(body: _Body) -> None:
    if body.background:
        raise _unsupported("background", "background responses are not supported: send the request without it.")
    if body.previous_response_id is not None and body.conversation is not None:
        message = "previous_response_id and conversation exclude each other: send one of them."
        raise BadRequest(message, param="previous_response_id", code="invalid_value")


def _check_names(tools: Sequence[_Tool], place: str) -> None:
    for index, tool in enumerate(tools):
        if tool.type in {"function", "custom", "namespace"} and tool.name is None:
            where = f"{place}.{index}.name"
            raise BadRequest(f"Missing required parameter: '{where}'.", param=where, code="missing_required_parameter")
        _check_names(tool.tools or (), f"{place}.{index}.tools")


def _schema(text: _Text | None) -> Json | None:
    if text is None or text.format is None:
        return None
    return answer_schema(text.format.type, text.format.definition, param="text.format", place="text.format.schema")


def _required(choice: str | _ToolChoice | None, tools: Sequence[Tool]) -> tuple[str, ...]:
    if choice == "required":
        return required_tools(tools, None)
    if isinstance(choice, str | None):
        return ()
    if choice.type in {"function", "custom"}:
        return required_tools(tools, [choice.name or ""])
    # One without a name is hosted, and so is every other choice.
    names = [tool.name for tool in choice.tools if tool.name is not None]
    is_required = choice.type == "allowed_tools" and choice.mode == "required"
    return required_tools(tools, names) if is_required and (names or not choice.tools) else ()


def _unsupported(param: str, message: str) -> BadRequest:
    return BadRequest(f"{param}: {message}", param=param, code="unsupported_parameter")


def _neutral_tool(tool: Json) -> Tool:
    return Tool.of({name: value for name, value in tool.items() if name != "type" and value is not None})


def _wire_tool(tool: Tool) -> Json:
    return {"type": "function", "description": None, "parameters": None, "strict": None, **tool.function}


def _conversation_id(request: ModelRequest) -> str | None:
    sent = request.parameters.get("conversation")
    return sent["id"] if isinstance(sent, dict) else sent


def _turns_before(stored: StoredAnswer) -> Sequence[Turn]:
    return stored.conversation.turns[1 if stored.parameters.get("instructions") else 0 :]


def _turns_after(stored: StoredAnswer) -> Sequence[Turn]:
    [answer] = stored.completion.answers
    return (*_turns_before(stored), answer.turn)


def found(value: T | None, what: str, name: str, param: str) -> T:
    """Returns the value. Raises: NotServed: it is None."""
    if value is None:
        message = f"No {what} with the id '{name[:100]}' in this attempt: it was deleted, not stored, or not completed."
        raise NotServed(message, param=param, code="not_found")
    return value
