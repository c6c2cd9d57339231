"""Conversations of calls that give only what each adds to an earlier call of its attempt.

A call's conversation begins with the first `shared_turns` turns of the call `parent_call_id`: its turns, then its
answer. Its prompt begins with the first `shared_tokens` tokens of that call: its prompt, then its sampled tokens.
"""

from __future__ import annotations

from leyden.libs.contracts.api.rollouts import Call
from leyden.libs.contracts.conversation import Json, Turn


class Chains:
    """The calls of a rollout in the order of the API's list. Memory: as much as the calls add."""

    def __init__(self) -> None:
        self._calls: dict[str, Call] = {}
        self._lost: dict[str, str] = {}

    def add(self, call: Call) -> Call:
        """Returns the call; one without all earlier calls has the reason, and no turns."""
        parent = call.parent_call_id
        if call.turns is not None and parent is not None and parent not in self._calls:
            reason = self._lost.get(parent, f"call {call.id} has the parent {parent}, which is not in the store")
            call = call.model_copy(update={"missing_parent": reason, **dict.fromkeys(("turns", "tools", "prompt_ids"))})
        if call.turns is None:
            self._lost[call.id] = call.missing_parent or ""
        else:
            self._calls[call.id] = call
        return call

    def whole(self, call: Call) -> Call:
        """Returns an added call with its whole conversation and prompt, as one without a parent."""
        if call.turns is None or call.parent_call_id is None:
            return call
        alone = {"parent_call_id": None, "shared_turns": 0, "shared_tokens": 0}
        ids = None if call.prompt_ids is None else self._prompt_ids(call)
        return call.model_copy(
            update={"turns": self.turns(call), "tools": self.tools(call), "prompt_ids": ids, **alone}
        )

    def turns(self, call: Call) -> tuple[Turn, ...]:
        """The turns in the request of an added call."""
        turns: list[Turn] = []
        for one in self._chain(call):
            del turns[one.shared_turns :]
            turns += one.turns or ()
            if one is not call and one.answer is not None:
                turns.append(one.answer)
        return tuple(turns)

    def tools(self, call: Call) -> tuple[Json, ...]:
        """The tools in the request of an added call."""
        return next((one.tools for one in reversed(self._chain(call)) if one.tools is not None), ())

    def _prompt_ids(self, call: Call) -> list[int]:
        ids: list[int] = []
        for one in self._chain(call):
            del ids[one.shared_tokens :]
            ids += one.prompt_ids or ()
            if one is not call:
                ids += one.sampled_ids
        return ids

    def _chain(self, call: Call) -> list[Call]:
        """The earlier calls, the first one first, and the call."""
        chain = [call]
        while (parent := chain[-1].parent_call_id) is not None:
            chain.append(self._calls[parent])
        return chain[::-1]
