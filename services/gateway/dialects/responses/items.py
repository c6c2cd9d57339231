"""Items of the Responses API and conversations: items to turns, and turns to items.

An answer's items have ids made from its call: `rs_<call>` its reasoning, `msg_<call>` its text, `fc_<call>_<k>` its
tool calls, and `_i<k>` at the end marks the k-th item of its input. So an id names a call of the store and needs no row
of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

from pydantic import Field, model_validator

from leyden.libs.contracts.conversation import Json, Role, ToolCall, Turn
from leyden.services.gateway.calls.context import TokenLogprob
from leyden.services.gateway.dialects.body import Wire
from leyden.services.gateway.dialects.chat_completions import logprobs_of
from leyden.services.gateway.dialects.custom import WireTools, arguments_of
from leyden.services.gateway.dialects.responses.tools import call_item, flat_name
from leyden.services.gateway.errors import BadRequest

CALL_ID = re.compile(r"(?:resp|msg|fc|fco|rs|call)_(c[0-9a-f]{24})(?:_i\d+)?(?:_\d+)?")
ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
TEXT_PARTS = frozenset({"input_text", "output_text", "text", "refusal"})
NO_TOOLS: WireTools = MappingProxyType({})
HOSTED_ITEMS = frozenset(
    {
        *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "compaction"),
        *("mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
        *("tool_search_call", "tool_search_output", "local_shell_call", "local_shell_call_output"),
        *("shell_call", "shell_call_output", "apply_patch_call", "apply_patch_call_output"),
    }
)
"""Types of items that the model is not shown: their content has no place in a conversation of functions."""
SUMMARY = "leyden:"
"""The begin of the content of this gateway's own compactions; the rest is the model's summary."""
SUMMARY_TURN = "The conversation so far, but for the user's messages, summed up:\n"
"""The begin of the user's message that shows a summary to the model."""
T = TypeVar("T")
ObjectId = Annotated[str, Field(max_length=256, pattern=r"^[^\x00]*$")]
"""An id that the store can hold."""


class _Part(Wire):
    type: str
    text: str | None = None
    refusal: str | None = None


class Item(Wire):
    """One item of a request's input; the fields of the types that this model reads."""

    type: str | None = None
    id: ObjectId | None = None
    role: str | None = None
    content: str | list[_Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    namespace: str | None = None
    input: str | None = None
    output: str | list[_Part] | None = None
    tools: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _hosted_ones_are_not_read(cls, item: Any) -> Any:
        """Their fields have the names of others, and other types."""
        is_hosted = isinstance(item, dict) and isinstance(item.get("type"), str) and item["type"] in HOSTED_ITEMS
        if not is_hosted:
            return item
        kept = {"encrypted_content": item.get("encrypted_content")} if item["type"] == "compaction" else {}
        return {"type": item["type"], **kept}

    @property
    def kind(self) -> str:
        """Its type; OpenAI's clients may leave out `message` and `item_reference`."""
        return self.type or ("item_reference" if self.role is None and self.id is not None else "message")

    @property
    def summary(self) -> str | None:
        """The summary in a compaction of this gateway's; None for every other item, and those of other servers."""
        content = self.encrypted_content if self.kind == "compaction" else None
        return content.removeprefix(SUMMARY) if content is not None and content.startswith(SUMMARY) else None

    @property
    def is_hosted(self) -> bool:
        """Whether only a vendor's server can read it."""
        return self.kind in HOSTED_ITEMS and self.summary is None


def call_of(item_id: str | None) -> str | None:
    """Returns the call that an id was made from; None for an id of the agent's own.

    >>> call_of("weather_1") is None
    True
    """
    found = CALL_ID.fullmatch(item_id or "")
    return found[1] if found else None


def turns_of(items: Sequence[Item], earlier: Sequence[Turn] = (), *, checks_results: bool = True) -> tuple[Turn, ...]:
    """Returns the earlier turns and those of the items; the text and the tool calls of one answer become one turn.

    Args: checks_results: False accepts results of tool calls that are not among the items
    Raises: BadRequest: an item has a type, role or part that this model does not read, lacks a field, or answers a tool
        call that is not in the conversation
    """
    conversation = _Conversation(list(earlier), {call.id for turn in earlier for call in turn.tool_calls})
    for index, item in enumerate(items):
        conversation.add(item, f"input.{index}", checks_results=checks_results)
    return tuple(conversation.turns)


@dataclass
class _Conversation:
    """Turns so far. answer: the place of the last assistant's turn, and the call that sampled it."""

    turns: list[Turn]
    call_ids: set[str]
    answer: tuple[int, str | None] | None = None

    def add(self, item: Item, where: str, *, checks_results: bool) -> None:
        match item.kind:
            case "message":
                self._add_message(item, where)
            case "function_call" | "custom_tool_call":
                self._add_call(item, where)
            case "function_call_output" | "custom_tool_call_output":
                call_id = _required(item.call_id, f"{where}.call_id")
                if checks_results and call_id not in self.call_ids:
                    message = f"No tool call found for function call output with call_id '{call_id[:100]}'."
                    raise BadRequest(message, param=f"{where}.call_id", code="invalid_value")
                self.turns.append(Turn("tool", _text(item.output, f"{where}.output"), tool_call_id=call_id))
            # The tools of the latter are among those of the request.
            case "reasoning" | "additional_tools":
                pass
            case _ if item.is_hosted:
                pass
            case "compaction":
                self.turns.append(Turn("user", f"{SUMMARY_TURN}{item.summary}"))
            case other:
                raise BadRequest(
                    f"{where} has the type '{other[:100]}': this model reads messages, function calls and their"
                    " outputs, reasoning and item references.",
                    param=f"{where}.type",
                    code="unsupported_item",
                )

    def _add_message(self, item: Item, where: str) -> None:
        turn = _message(item, where)
        if turn.role == "assistant":
            self.answer = (len(self.turns), call_of(item.id))
        self.turns.append(turn)

    def _add_call(self, item: Item, where: str) -> None:
        custom = item.kind == "custom_tool_call"
        call = ToolCall(
            _required(item.call_id, f"{where}.call_id"),
            flat_name(_required(item.name, f"{where}.name"), item.namespace),
            arguments_of(_required(item.input, f"{where}.input"))
            if custom
            else _required(item.arguments, f"{where}.arguments"),
        )
        self.call_ids.add(call.id)
        origin = call_of(call.id) or call_of(item.id)
        if self.answer is None or not _is_same_answer(self.turns, self.answer, origin):
            self.answer = (len(self.turns), origin)
            self.turns.append(Turn("assistant", ""))
        place, sampled_by = self.answer
        self.answer = (place, sampled_by or origin)
        turn = self.turns[place]
        self.turns[place] = replace(turn, tool_calls=(*turn.tool_calls, call))


def items_of(turn: Turn, name: str, *, status: str = "completed", wire: WireTools = NO_TOOLS) -> list[Json]:
    """Returns the items of a turn.

    Args: name: the end of their ids; wire: the tools that their request had in another form than functions
    """
    if turn.role == "tool":
        output = {"call_id": turn.tool_call_id, "output": turn.content, "status": status}
        return [{"id": f"fco_{name}", "type": "function_call_output", **output}]
    if turn.role != "assistant":
        content = [{"type": "input_text", "text": turn.content}]
        return [{"id": f"msg_{name}", "type": "message", "status": status, "role": turn.role, "content": content}]
    ended = "completed" if turn.content or turn.tool_calls else status
    items = [reasoning_item(name, turn.reasoning, ended)] if turn.reasoning else []
    if turn.content or not turn.tool_calls:
        items.append(message_item(name, turn.content, None, status))
    return [*items, *(call_item(call, f"fc_{name}_{number}", wire) for number, call in enumerate(turn.tool_calls))]


def stored_items(items: Sequence[Item], name: str) -> dict[str, Json]:
    """Returns items as a conversation stores them, by id; reasoning is not stored.

    Args: name: the end of the ids of items that have none of an answer's
    Raises: BadRequest: as `turns_of`
    """
    documents: dict[str, Json] = {}
    for index, item in enumerate(items):
        for turn in turns_of([item], checks_results=False):
            [document] = items_of(turn, f"{name}_n{index}")
            # An id of the agent's own may come again with other content.
            item_id = item.id if item.id and call_of(item.id) else document["id"]
            documents[item_id] = document | {"id": item_id}
    return documents


def message_item(name: str, text: str, logprobs: Sequence[TokenLogprob] | None, status: str) -> Json:
    """Returns the message of an answer."""
    content = [text_part(text, logprobs)]
    return {"id": f"msg_{name}", "type": "message", "status": status, "role": "assistant", "content": content}


def reasoning_item(name: str, text: str, status: str) -> Json:
    """Returns the reasoning of an answer."""
    return {"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": [reasoning_part(text)], "status": status}


def text_part(text: str, logprobs: Sequence[TokenLogprob] | None) -> Json:
    """Returns the text of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs_of(logprobs or ())}


def reasoning_part(text: str) -> Json:
    """Returns the text of a reasoning item."""
    return {"type": "reasoning_text", "text": text}


def _is_same_answer(turns: Sequence[Turn], answer: tuple[int, str | None], origin: str | None) -> bool:
    """Whether a tool call belongs to the last assistant's turn: it follows it, or the same call sampled both."""
    place, sampled_by = answer
    if origin is not None and sampled_by is not None:
        return origin == sampled_by and all(turn.role == "tool" for turn in turns[place + 1 :])
    return place == len(turns) - 1


def _message(item: Item, where: str) -> Turn:
    role = ROLES.get(_required(item.role, f"{where}.role"))
    if role is None:
        allowed = ", ".join(ROLES)
        raise BadRequest(f"{where}.role must be one of {allowed}.", param=f"{where}.role", code="invalid_value")
    return Turn(role, _text(item.content, f"{where}.content"))


def _text(content: str | Sequence[_Part] | None, where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in _required(content, where):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in TEXT_PARTS or text is None:
            message = f"{where} has a part of type '{part.type[:100]}': this model reads text parts only."
            raise BadRequest(message, param=where, code="unsupported_content")
        texts.append(text)
    return "\n".join(texts)


def _required(value: T | None, where: str) -> T:
    if value is None:
        raise BadRequest(f"Missing required parameter: '{where}'.", param=where, code="missing_required_parameter")
    return value
