"""Answers of the task's own conversation, as if a provider gave them: the record of a dataset of conversations."""

from __future__ import annotations

import json

from leyden.libs.contracts.conversation import CONVERSATION, Json, conversation_fault
from leyden.services.gateway.calls.context import Answer, Attempt, ModelRequest
from leyden.services.gateway.dialects.chat_client import ProvidedAnswer
from leyden.services.gateway.dialects.chat_completions import parse_document
from leyden.services.gateway.errors import BadRequest
from leyden.services.gateway.records.reader import Reader

SHAPE = frozenset({"messages", "tools", "chat_template_kwargs"})
"""Fields of a row that make prompts."""


class TaskConversation:
    """The answerer of one attempt, whose task is a row of OpenAI's fine-tuning format."""

    def __init__(self, reader: Reader, attempt: Attempt) -> None:
        self._reader = reader
        self._attempt = attempt

    async def ask(self, provider: str, model: str | None, request: ModelRequest, request_id: str) -> ProvidedAnswer:
        """Returns the message of the task that follows the messages of the request.

        Raises: BadRequest: the task has no conversation, it does not begin with these messages, or no answer follows
        """
        row = await self._reader.task(self._attempt.rollout_id)
        fault = "the store has no task of this attempt" if row is None else conversation_fault(row)
        if row is None or fault:
            raise BadRequest(f"The task holds no conversation: {fault}.", param="messages")
        conversation, count = parse_conversation(row), len(request.turns)
        if request.turns != conversation.turns[:count]:
            raise BadRequest("The task's messages begin otherwise: send those before an answer.", param="messages")
        if count >= len(conversation.turns) or conversation.turns[count].role != "assistant":
            raise BadRequest(f"Message {count} of the task is no assistant's: ask for one that is.", param="messages")
        if request.choices != 1:
            raise BadRequest("The task has one answer: send n 1.", param="n")
        turn = conversation.turns[count]
        return ProvidedAnswer((Answer(0, turn, "tool_calls" if turn.tool_calls else "stop", None),), 0, 0)


def parse_conversation(row: Json) -> ModelRequest:
    """Reads a row in which `conversation_fault` finds nothing as the request of all its messages."""
    document = {name: value for name, value in row.items() if name in SHAPE and value is not None}
    messages = [_with_text(message) for message in document["messages"]]
    return parse_document({"model": CONVERSATION, **document, "messages": messages}, b"", max_choices=1)


def _with_text(message: Json) -> Json:
    """The message with the arguments of its tool calls as text, where TRL's rows have objects."""
    calls = [
        {**call, "function": {**call["function"], "arguments": _text(call["function"].get("arguments", ""))}}
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else message


def _text(arguments: Json | str) -> str:
    """As agents write it, so that the messages that they send back are the task's."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
