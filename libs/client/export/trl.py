"""TRL's conversational prompt-completion format, as its SFTTrainer reads it, with the reward beside."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

from leyden.libs.client.export.base import Inexpressible, LeftOut, Reader, by_rollout
from leyden.libs.client.export.conversations import Conversation
from leyden.libs.contracts.api.rollouts import Rollout
from leyden.libs.contracts.conversation import Json, ToolCall, Turn
from leyden.libs.contracts.strict import is_too_deep


class Trl:
    """A row for each part of a conversation: all before its first own answer is the prompt, the rest the completion.

    A part ends where the agent wrote an assistant's message, which is no answer to learn.
    """

    def rows(
        self, rollouts: Iterable[Rollout], read: Reader, left_out: LeftOut, *, per_task: int | None
    ) -> Iterator[Json]:
        """Converts each conversation without a malformed tool call."""

        def converted(conversation: Conversation) -> Iterator[Json]:
            try:
                messages = trl_messages(conversation.turns)
            except Inexpressible as reason:
                left_out[str(reason)] += 1
                return
            for first, last in conversation.stretches:
                yield _row(conversation, messages[:first], messages[first : last + 1])

        return by_rollout(rollouts, read, per_task, converted)


def _row(conversation: Conversation, prompt: list[Json], completion: list[Json]) -> Json:
    return {
        "prompt": prompt,
        "completion": completion,
        **trl_tools(conversation),
        "reward": conversation.rollout.reward,
        "rollout": conversation.rollout.id,
        "task": conversation.rollout.task_number,
        "role": conversation.role,
    }


def trl_tools(conversation: Conversation) -> Json:
    """The column `tools`, where the model was offered any."""
    return {"tools": list(conversation.tools)} if conversation.tools else {}


def trl_messages(turns: Sequence[Turn]) -> list[Json]:
    """Messages as chat templates of transformers read them: arguments of tool calls are objects, not text.

    Raises: Inexpressible: arguments of a tool call are no JSON object
    """
    tools = {call.id: call.name for turn in turns for call in turn.tool_calls}
    return [_message(turn, tools.get(turn.tool_call_id or "")) for turn in turns]


def _message(turn: Turn, tool: str | None) -> Json:
    message: Json = {"role": turn.role, "content": turn.content}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _arguments(call)}}
            for call in turn.tool_calls
        ]
    if turn.tool_call_id is not None:
        message["tool_call_id"] = turn.tool_call_id
    if name := turn.name or tool:
        message["name"] = name
    return message


def _arguments(call: ToolCall) -> Json:
    found = json_object(call.arguments)
    if found is None:
        raise Inexpressible("conversations with a tool call whose arguments are no JSON object")
    return found


def json_object(text: str) -> Json | None:
    """The object of a JSON text; None where it is none, or nests deeper than readers of rows do."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and not is_too_deep(found) else None
