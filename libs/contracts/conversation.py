"""A conversation in Leyden's own form, as `model_calls` stores it for all wire formats.

The gateway's dialects translate wire formats into these types; credit, API, CLI and reports read only these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

Json = dict[str, Any]
Role = Literal["system", "user", "assistant", "tool"]


CONVERSATION = "conversation"
"""The provider that the platform is itself: it answers with the next message of the task's `messages`."""


class Dialect(StrEnum):
    """The wire format of a request; the column `model_calls.dialect`."""

    CHAT_COMPLETIONS = "chat_completions"
    RESPONSES = "responses"
    COMPLETIONS = "completions"
    MESSAGES = "messages"
    OLLAMA_CHAT = "ollama_chat"
    GEMINI = "gemini"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of an assistant: `arguments` is JSON text, exactly as sampled or as the agent sent it back.

    `is_malformed`: the model sampled a call that is not valid JSON; an agent that sends it back does not say so.
    """

    id: str
    name: str
    arguments: str
    is_malformed: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a request offers to the model.

    `document` is the object that chat templates read, {"type": "function", "function": {"name": …, "parameters": …}},
    its members in the order that the agent sent.
    """

    document: Json

    @classmethod
    def of(cls, function: Json) -> Tool:
        """The tool of a function: its name and, where the agent says them, description, parameters and strict."""
        return cls({"type": "function", "function": function})

    @property
    def function(self) -> Json:
        """Its name and all that the agent says about it."""
        function: Json = self.document["function"]
        return function

    @property
    def name(self) -> str:
        """The name by which the model calls it."""
        name: str = self.function["name"]
        return name

    @property
    def parameters(self) -> Any:
        """The JSON Schema of its arguments, or whatever the agent sent in its place; None without one."""
        return self.function.get("parameters")

    @property
    def is_strict(self) -> bool:
        """Whether the agent asks that arguments follow the schema."""
        return bool(self.function.get("strict"))


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation; `content` is text, parts joined by newlines.

    `tool_calls` belongs to assistants, `tool_call_id` to the tool result that answers one of them, `is_error` to one
    that the agent marked as failed. `reasoning` is what an assistant wrote before its content, "" where it wrote the
    marks alone, None without them.
    """

    role: Role
    content: str
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    is_error: bool = False
    reasoning: str | None = None


def turn_json(turn: Turn) -> Json:
    """Converts a turn to a JSON object without its empty optional fields."""
    document: Json = {"role": turn.role, "content": turn.content}
    if turn.name is not None:
        document["name"] = turn.name
    if turn.tool_calls:
        document["tool_calls"] = [
            {"id": call.id, "name": call.name, "arguments": call.arguments}
            | ({"is_malformed": True} if call.is_malformed else {})
            for call in turn.tool_calls
        ]
    if turn.tool_call_id is not None:
        document["tool_call_id"] = turn.tool_call_id
    if turn.is_error:
        document["is_error"] = True
    if turn.reasoning is not None:
        document["reasoning"] = turn.reasoning
    return document


def parse_turn(document: Mapping[str, Any]) -> Turn:
    """Reads a stored JSON object, which was validated when it was recorded."""
    return Turn(
        role=document["role"],
        content=document["content"],
        name=document.get("name"),
        tool_calls=tuple(
            ToolCall(call["id"], call["name"], call["arguments"], call.get("is_malformed", False))
            for call in document.get("tool_calls", ())
        ),
        tool_call_id=document.get("tool_call_id"),
        is_error=document.get("is_error", False),
        reasoning=document.get("reasoning"),
    )


def parse_turns(documents: Iterable[Mapping[str, Any]]) -> tuple[Turn, ...]:
    """Reads the turns of a stored JSON array."""
    return tuple(map(parse_turn, documents))


def conversation_fault(row: Mapping[str, Any]) -> str | None:
    """Why a row is no conversation in OpenAI's fine-tuning format; None for one that has an answer to learn.

    The arguments of a tool call may be an object, too, as in TRL's rows.

    >>> conversation_fault({"messages": [{"role": "user", "content": "hi"}]})
    'messages: none is an assistant\'s after another message, so that nothing would train: add the answer'
    """
    messages, tools = row.get("messages"), row.get("tools")
    if not isinstance(messages, list) or not messages:
        return "messages: write a list of messages, each with role and content"
    if tools is not None and not isinstance(tools, list):
        return "tools: write a list of tools, or leave it out"
    for number, tool in enumerate(tools or ()):
        if not isinstance(tool, dict) or tool.get("type") != "function" or not _name_of(tool):
            return f"tools.{number}: write an object with type 'function' and a function that has a name"
    if not isinstance(row.get("chat_template_kwargs"), dict | None):
        return "chat_template_kwargs: write an object, or leave it out"
    for number, message in enumerate(messages):
        if fault := _message_fault(message):
            return f"messages.{number}{fault}"
    if not any(message["role"] == "assistant" for message in messages[1:]):
        return "messages: none is an assistant's after another message, so that nothing would train: add the answer"
    return None


def _message_fault(message: Any) -> str | None:
    """A message's fault, after its place; None for a message that the gateway reads."""
    roles = ("system", "developer", "user", "assistant", "tool")
    if not isinstance(message, dict) or message.get("role") not in roles:
        return f": write an object with role {', '.join(roles[:-1])} or {roles[-1]}"
    content, calls = message.get("content"), message.get("tool_calls")
    if not isinstance(calls, list | None):
        return ".tool_calls: write a list, or leave it out"
    if content is None and not (calls and message["role"] == "assistant"):
        return ": write content, or tool_calls of an assistant"
    parts = content if isinstance(content, list) else []
    if not isinstance(content, str | list | None) or not all(map(_is_text_part, parts)):
        return ".content: write text, or a list of parts of type text"
    for name in ("name", "tool_call_id"):
        if not isinstance(message.get(name), str | None):
            return f".{name}: write text, or leave it out"
    faults = ((number, _call_fault(call)) for number, call in enumerate(calls or ()))
    return next((f".tool_calls.{number}{fault}" for number, fault in faults if fault), None)


def _is_text_part(part: Any) -> bool:
    if not isinstance(part, dict) or part.get("type") not in ("text", "refusal"):
        return False
    others = (part.get(name) for name in ("text", "refusal"))
    return isinstance(part.get(part["type"]), str) and all(isinstance(one, str | None) for one in others)


def _call_fault(call: Any) -> str | None:
    if not isinstance(call, dict) or _name_of(call) is None:
        return ".function: write an object with name and arguments"
    if not isinstance(call.get("id", ""), str):
        return ".id: write text, or leave it out"
    if not isinstance(call["function"].get("arguments", ""), str | dict):
        return ".function.arguments: write JSON as text, or an object"
    return None


def _name_of(document: Mapping[str, Any]) -> str | None:
    """The name of a tool's or a call's function; None where it has none that is text."""
    function = document.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None
