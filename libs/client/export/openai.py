"""OpenAI's format of supervised fine-tuning: one line a conversation, `{"messages": […], "tools": […]}`.

OpenAI refuses keys that it does not know, so that rewards are not in it.
"""

from __future__ import annotations

from leyden.libs.client.export.base import ByConversation
from leyden.libs.client.export.conversations import Conversation
from leyden.libs.contracts.conversation import Json, Turn


class OpenAI(ByConversation):
    """Assistant's messages that came from the agent, or stand in an earlier line, have `weight` 0: they train not."""

    def row(self, conversation: Conversation) -> Json:
        """Converts one conversation."""
        messages = [
            _message(turn, trains=at in conversation.own if turn.role == "assistant" else True)
            for at, turn in enumerate(conversation.turns)
        ]
        return {"messages": messages, **({"tools": list(conversation.tools)} if conversation.tools else {})}


def _message(turn: Turn, *, trains: bool) -> Json:
    """The message; the format has no place for reasoning and for marks of failed tools."""
    message: Json = {"role": turn.role, "content": None if turn.tool_calls and not turn.content else turn.content}
    if turn.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in turn.tool_calls
        ]
    if turn.tool_call_id is not None:
        message["tool_call_id"] = turn.tool_call_id
    if turn.name is not None and turn.role != "tool":
        message["name"] = turn.name
    return message if trains else {**message, "weight": 0}
