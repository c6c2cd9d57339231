"""The conversations of a rollout, from its model calls: a call that a later one continues is part of that one's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from leyden.libs.client.chains import Chains
from leyden.libs.contracts.api.rollouts import Call, Rollout
from leyden.libs.contracts.conversation import Json, Turn


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that a model was asked with, and its last answer.

    `number`: from 1, in the order of their last calls. `answers`: by the position in `turns`, the calls that sampled an
    assistant's turn; other assistant's turns came from the agent. `own`: the positions of those answers that no earlier
    conversation of the rollout has.
    """

    rollout: Rollout
    number: int
    agent: str | None
    role: str | None
    turns: tuple[Turn, ...]
    tools: tuple[Json, ...]
    answers: Mapping[int, Call]
    own: frozenset[int]

    @property
    def id(self) -> str:
        """The rollout's id and the number."""
        return f"{self.rollout.id}/{self.number}"

    @property
    def stretches(self) -> list[tuple[int, int]]:
        """The first and the last own answer of each part in which no assistant's turn is another one."""
        found: list[tuple[int, int]] = []
        is_open = False
        for at, turn in enumerate(self.turns):
            if at in self.own:
                found.append((found.pop()[0] if is_open else at, at))
            if turn.role == "assistant":
                is_open = at in self.own
        return found


class Conversations(NamedTuple):
    """The conversations of a rollout, and the numbers of its answers that are in none of them."""

    found: list[Conversation]
    incomplete: int
    """An earlier call is not in the store."""
    undelivered: int
    """The agent had hung up, and no later call continues the answer."""


@dataclass(frozen=True, slots=True)
class _Answered:
    """A call with its answer, and the call whose conversation it continues."""

    call: Call
    at: int
    parent: _Answered | None


@dataclass(frozen=True, slots=True)
class _Named:
    """The names of a call's own turns and its answer, which follow the first `shared` turns of the parent."""

    parent: _Named | None
    shared: int
    digests: Sequence[bytes]

    def before(self, position: int) -> Iterator[bytes]:
        """The names of the first turns, the last one first."""
        one: _Named | None = self
        while one is not None:
            yield from reversed(one.digests[: max(0, position - one.shared)])
            position = min(position, one.shared)
            one = one.parent


def conversations_of(rollout: Rollout, calls: Iterable[Call]) -> Conversations:
    """Finds which calls continue which. Time and memory: as much as the calls add to their parents.

    Args: calls: of one attempt, in the order of their arrival
    """
    chains, named, added = Chains(), dict[str, _Named](), dict[str, Call]()
    by_digest: dict[bytes, _Answered] = {}
    last: dict[str, _Answered] = {}
    incomplete = 0
    for call in map(chains.add, calls):
        if call.turns is not None:
            named[call.id] = _named(call, named)
        if call.status != "completed" or call.answer is None:
            continue
        if call.turns is None:
            incomplete += 1
            continue
        own, at = named[call.id], call.shared_turns + len(call.turns)
        parent = next((by_digest[digest] for digest in own.before(at) if digest in by_digest), None)
        slim = call.model_copy(update={**dict.fromkeys(("turns", "tools", "parent_call_id")), "shared_turns": 0})
        answered = _Answered(slim, at, parent)
        if parent is not None:
            last.pop(parent.call.id, None)
        by_digest[own.digests[-1]] = answered
        added[call.id] = call
        last[call.id] = answered
    kept = [(one, chains.whole(added[one.call.id])) for one in _delivered(list(last.values()))]
    return Conversations(
        _numbered(rollout, kept), incomplete, sum(one.call.delivered is False for one in last.values())
    )


def _delivered(last: Sequence[_Answered]) -> Iterator[_Answered]:
    """The last answers of conversations that reached the agent: in place of one that did not, that before it."""
    ends = [one for one in last if one.call.delivered is not False]
    before = [one.parent for one in last if one.call.delivered is False and one.parent is not None]
    within = {earlier.call.id for one in (*ends, *before) for earlier in _earlier(one)}
    yield from ends
    yield from {one.call.id: one for one in before if one.call.id not in within}.values()


def _earlier(answered: _Answered) -> Iterator[_Answered]:
    one = answered.parent
    while one is not None:
        yield one
        one = one.parent


def _named(call: Call, named: Mapping[str, _Named]) -> _Named:
    parent = named[call.parent_call_id] if call.parent_call_id else None
    digest = next(parent.before(call.shared_turns), b"") if parent else b""
    digests = []
    for turn in (*(call.turns or ()), *([] if call.answer is None else [call.answer])):
        digests.append(digest := _digest(digest, turn))
    return _Named(parent, call.shared_turns, digests)


def _numbered(rollout: Rollout, kept: Iterable[tuple[_Answered, Call]]) -> list[Conversation]:
    found: list[Conversation] = []
    seen: set[str] = set()
    for number, (answered, call) in enumerate(kept, 1):
        answers: dict[int, Call] = {}
        one: _Answered | None = answered
        while one is not None:
            answers[one.at] = one.call
            one = one.parent
        own = frozenset(at for at, sampled in answers.items() if sampled.id not in seen)
        seen |= {sampled.id for sampled in answers.values()}
        assert call.turns is not None
        assert call.answer is not None
        turns, tools = (*call.turns, call.answer), call.tools or ()
        found.append(Conversation(rollout, number, call.agent_name, call.role, turns, tools, answers, own))
    return found


def _digest(before: bytes, turn: Turn) -> bytes:
    """Names a conversation that ends with this turn; a malformed tool call counts by its text, as in `Turn.__eq__`."""
    calls = [(call.id, call.name, call.arguments) for call in turn.tool_calls]
    parts = (turn.role, turn.content, turn.name, calls, turn.tool_call_id, turn.is_error, turn.reasoning)
    return hashlib.blake2b(before + json.dumps(parts).encode(), digest_size=16).digest()
