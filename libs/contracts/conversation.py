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

    >>> conversation_fault({"messages": [{"role": "user", "content": "hi"}]})
    'messages: none is an assistant\'s after another message, so that nothing would train: add the answer'
    """
    messages, tools = row.get("messages"), row.get("tools")
    if not isinstance(messages, list) or not messages:
        return "messages: write a list of messages, each with role and content"
    if tools is not None and not isinstance(tools, list):
        return "tools: write a list of tools, or leave it out"
    roles = ("system", "developer", "user", "assistant", "tool")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in roles:
            return f"messages.{number}: write an object with role {', '.join(roles[:-1])} or {roles[-1]}"
        if message.get("content") is None and not message.get("tool_calls"):
            return f"messages.{number}: write content, or tool_calls of an assistant"
    if not any(message["role"] == "assistant" for message in messages[1:]):
        return "messages: none is an assistant's after another message, so that nothing would train: add the answer"
    return None
