"""Ids of tool calls as templates and providers take them; agents and records have those of the conversation."""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from leyden.libs.contracts.conversation import ToolCall, Turn

SHORT = 9
"""Letters and digits of an id in the templates of Mistral, which refuse every other length."""
_SHORT = re.compile(rf"[A-Za-z0-9]{{{SHORT}}}")


class OpenCalls:
    """The calls of one turn that wait for their results. Thousands of results cost one look each."""

    def __init__(self, calls: Sequence[ToolCall]) -> None:
        self._by_id = defaultdict[str, deque[int]](deque)
        self._by_name = defaultdict[str, deque[int]](deque)
        self._open = OrderedDict(enumerate(calls))
        for number, call in self._open.items():
            self._by_id[call.id].append(number)
            self._by_name[call.name].append(number)

    def take(self, call_id: str | None, name: str | None) -> ToolCall | None:
        """Removes and returns the first open call with this id, or with this name where the result has no id."""
        waiting = self._by_id.get(call_id) if call_id else self._by_name.get(name or "")
        while waiting:
            if (call := self._open.pop(waiting.popleft(), None)) is not None:
                return call
        return None

    def take_first(self) -> ToolCall | None:
        """Removes and returns the first open call."""
        return self._open.popitem(last=False)[1] if self._open else None


def given_ids(turns: Iterable[Turn]) -> Iterator[Turn]:
    """Yields the turns with an id for each tool call that has none, as those of Ollama's and some of Gemini's clients.

    A call gets the id of its place, so a later request has the same. A result without one gets the id of the first open
    call of its name, else of the first open call.
    """
    asked = OpenCalls(())
    for index, turn in enumerate(turns):
        if turn.tool_calls:
            named = enumerate(turn.tool_calls)
            calls = tuple(call if call.id else replace(call, id=f"call_{index}_{number}") for number, call in named)
            asked = OpenCalls(calls)
            yield replace(turn, tool_calls=calls)
        elif turn.role == "tool":
            call = asked.take(turn.tool_call_id, turn.name)
            if turn.tool_call_id or (call := call or asked.take_first()) is None:
                yield turn
            else:
                yield replace(turn, tool_call_id=call.id)
        else:
            yield turn


def short_ids(turns: Iterable[Turn]) -> Iterator[Turn]:
    """Yields the turns with ids of nine letters and digits: an id of another form becomes the start of its hash."""
    for turn in turns:
        calls = tuple(replace(call, id=_short(call.id)) for call in turn.tool_calls)
        answered = turn.tool_call_id
        if calls or answered is not None:
            turn = replace(turn, tool_calls=calls, tool_call_id=None if answered is None else _short(answered))
        yield turn


def _short(call_id: str) -> str:
    if _SHORT.fullmatch(call_id):
        return call_id
    return hashlib.blake2b(call_id.encode(), digest_size=SHORT).hexdigest()[:SHORT]
