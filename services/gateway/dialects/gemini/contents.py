"""Gemini's contents: the turns of a conversation, whose parts are texts, thoughts, function calls and responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Literal

import orjson
from pydantic import ConfigDict, Field

from leyden.libs.contracts.conversation import Json, ToolCall, Turn
from leyden.services.gateway.dialects.arguments import arguments_text
from leyden.services.gateway.dialects.gemini.wire import Proto
from leyden.services.gateway.errors import BadRequest
from leyden.services.gateway.prompt.tools.ids import OpenCalls

SIGNATURE = "thoughtSignature", "thought_signature"
"""Names of a field that a part may have without any content."""
ERROR = "error"
"""The member of a function's response that Google's clients send where the function failed."""
RESULTS = frozenset({"result", "output", ERROR})
"""Names of a response's only member, whose value is the result."""


class FunctionCall(Proto):
    id: str | None = None
    name: str = Field(min_length=1)
    args: dict[str, Any] | None = None


class FunctionResponse(Proto):
    id: str | None = None
    name: str = Field(min_length=1)
    response: dict[str, Any] | None = None
    parts: list[Any] | None = None


class Part(Proto):
    model_config = ConfigDict(extra="allow")
    text: str | None = None
    thought: bool | None = None
    function_call: FunctionCall | None = None
    function_response: FunctionResponse | None = None


class Content(Proto):
    role: Literal["user", "model", "function"] | None = None
    parts: list[Part] | None = None


def turns_of(contents: Sequence[Content]) -> Iterator[Turn]:
    """Yields the turns. A stream's chunks come back as contents of their own: together they are one turn.

    Raises: BadRequest: the model cannot read a part
    """
    asked = OpenCalls(())
    for is_model, group in groupby(enumerate(contents), key=lambda pair: pair[1].role == "model"):
        placed = [(f"contents.{index}.parts", content.parts or []) for index, content in group]
        if is_model:
            turn = _assistant([part for place, parts in placed for part in _readable(parts, place)])
            asked = OpenCalls(turn.tool_calls)
            yield turn
        else:
            for place, parts in placed:
                yield from _user(_readable(parts, place), asked, place)


def text_of(content: Content, place: str) -> str:
    """Returns the text of a content that has nothing else, as a system instruction.

    Raises: BadRequest: the model cannot read a part
    """
    return "\n".join(filter(None, (part.text for part in _readable(content.parts or [], f"{place}.parts"))))


def _assistant(parts: Sequence[Part]) -> Turn:
    thoughts = [part.text for part in parts if part.thought and part.text is not None]
    text = "".join(part.text for part in parts if part.text is not None and not part.thought)
    calls = tuple(
        ToolCall(call.id or "", call.name, arguments_text(call.args or {}))
        for part in parts
        if (call := part.function_call) is not None
    )
    return Turn("assistant", text, tool_calls=calls, reasoning="".join(thoughts) if thoughts else None)


def _user(parts: Sequence[Part], asked: OpenCalls, place: str) -> Iterator[Turn]:
    if not parts:
        yield Turn("user", "")
    for is_response, group in groupby(parts, key=lambda part: part.function_response is not None):
        if is_response:
            yield from (_result(part.function_response, asked, place) for part in group if part.function_response)
        else:
            yield Turn("user", "\n".join(part.text for part in group if part.text))


def _result(answered: FunctionResponse, asked: OpenCalls, place: str) -> Turn:
    """The turn of a result. Google's clients send no ids: it is for the first open call of the function."""
    if answered.parts:
        message = f"{place}: a function's response has parts: this model reads its `response` alone."
        raise BadRequest(message, param=place, code="unsupported_content")
    call = asked.take(answered.id, answered.name)
    response = answered.response or {}
    return Turn(
        "tool",
        _response_text(response),
        name=answered.name,
        tool_call_id=answered.id or (call.id if call else None) or None,
        is_error=ERROR in response and RESULTS.isdisjoint(response.keys() - {ERROR}),
    )


def _response_text(response: Json) -> str:
    value = next(iter(response.values())) if len(response) == 1 and not RESULTS.isdisjoint(response) else response
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _readable(parts: Sequence[Part], place: str) -> Sequence[Part]:
    for index, part in enumerate(parts):
        if part.text is None and part.function_call is None and part.function_response is None:
            others = (part.model_extra or {}).keys() - {*SIGNATURE}
            if others:
                kind = min(others)[:100]
                message = f"{place}.{index}.{kind}: this model reads text, function calls and function responses."
                raise BadRequest(message, param=f"{place}.{index}", code="unsupported_content")
    return parts
