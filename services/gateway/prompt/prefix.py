"""Finds the call whose tokens a prompt continues: sampled tokens are never encoded again.

A later prompt begins with the tokens of the call that it continues. The index finds that call by its conversation: a
chain of digests over the turns it was asked, and its answer. It takes the call's tokens only if the new prompt's text
begins with the old prompt's text, letter by letter (a template that drops earlier thoughts rewrites it). The text that
the template writes after the answer is encoded and appended. If no call can be continued, the whole prompt is encoded
and a new branch of the attempt's call forest begins.

The store is the truth. The index may drop an attempt at any moment: calls that it lacks are read from the store when
the conversation's last answer is unknown, which also finds the calls that another gateway served.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import orjson
from cachetools import LRUCache

from leyden.libs.contracts.conversation import Json, Turn
from leyden.libs.store.attempts import AttemptKey
from leyden.services.gateway.conversation import ModelRequest, Prompt
from leyden.services.gateway.errors import ContextOverflow
from leyden.services.gateway.prompt.template import ChatModel
from leyden.services.gateway.prompt.tokenizer import TokenIds
from leyden.services.gateway.prompt.tool_calls import parsed_arguments

MAX_DEPTH = 15
"""Rows between two complete ones: every sixteenth row of a chain is complete, so reading a call takes sixteen."""
RECENT_CALLS = 16
"""Calls that a new branch is compared with, to share their first turns in the store."""
LONG_CHARACTERS = 16_384
"""Longer texts take milliseconds to encode: a thread does it, so that other calls go on."""
CALL_BYTES, TURN_BYTES = 1000, 300
"""Memory of a call and of a turn beside their texts and tokens."""


class Conversation(NamedTuple):
    """Everything that a prompt depends on: turns, tools, and the template's options."""

    turns: tuple[Turn, ...]
    tools: tuple[Json, ...]
    options: Json


@dataclass(frozen=True, slots=True)
class StoredCall:
    """A completed call as the store has it; `depth` counts the rows that were read to complete it."""

    call_id: str
    conversation: Conversation
    answer: Turn
    prompt_ids: TokenIds
    sampled_ids: TokenIds
    depth: int


@dataclass(slots=True, eq=False)
class IndexedCall:
    """A completed call that later prompts of its attempt can continue.

    `turns` ends with the answer, `tokens` with the sampled tokens; they begin with those of `continued`. `text_length`
    and `text_digest` describe the prompt's text. `depth` counts the rows that complete its own in the store.
    """

    call_id: str
    turns: tuple[Turn, ...]
    tools: tuple[Json, ...]
    tokens: TokenIds
    sampled: int
    text_length: int
    text_digest: bytes
    depth: int
    continued: IndexedCall | None


@dataclass(frozen=True, slots=True, eq=False)
class IndexedPrompt:
    """A prompt, and what the index needs to let later prompts continue its answer.

    `chain` holds the digests of the conversation's beginnings. The prompt begins with all tokens of `continued`, and
    its row refers to `parent`.
    """

    prompt: Prompt
    conversation: Conversation
    text: str
    chain: list[bytes]
    continued: IndexedCall | None
    parent: IndexedCall | None


ReadCalls = Callable[[Collection[str]], Awaitable[Sequence[StoredCall]]]
"""Reads the completed calls of an attempt but those with these ids, oldest first."""


@dataclass(slots=True)
class _Attempt:
    by_conversation: dict[bytes, IndexedCall] = field(default_factory=dict)
    calls: dict[str, IndexedCall] = field(default_factory=dict)
    size_bytes: int = CALL_BYTES


class PrefixIndex:
    """The answered calls of the attempts used last, at most `max_bytes` in all."""

    def __init__(self, model: ChatModel, *, max_bytes: int) -> None:
        self._model = model
        # The attempt in use stays even if it alone exceeds the index.
        self._attempts: LRUCache[AttemptKey, _Attempt] = LRUCache(
            max_bytes, lambda attempt: min(attempt.size_bytes, max_bytes)
        )

    async def prompt(self, key: AttemptKey, request: ModelRequest, read: ReadCalls) -> IndexedPrompt:
        """The tokens to sample after.

        Raises: ContextOverflow: they leave no room for an answer; BadRequest: the template refuses the conversation
        """
        conversation = Conversation(request.turns, request.tools, request.template_options)
        chain = digest_chain(conversation)
        text = self._model.render(*conversation)
        await self._read_unknown(key, conversation, chain, read)
        attempt = self._attempts.get(key) or _Attempt()
        continued, rest, is_fork = self._continued(attempt, conversation, chain, text)
        if continued is None:
            ids = await self._encode(text, None)
        else:
            ids = np.concatenate([continued.tokens, await self._encode(rest, int(continued.tokens[-1]))])
        if len(ids) > self._model.tokenizer.context_length - 2:
            raise ContextOverflow(self._model.tokenizer.context_length, len(ids))
        parent, shared_turns = _parent(attempt, continued, conversation)
        shared_tokens = 0 if parent is None else _common(parent.tokens, ids)
        parent_call_id = None if parent is None else parent.call_id
        prompt = Prompt(ids, parent_call_id, shared_turns, shared_tokens, is_fork)
        return IndexedPrompt(prompt, conversation, text, chain, continued, parent)

    def remember(
        self, key: AttemptKey, call_id: str, indexed: IndexedPrompt, answer: Turn, sampled_ids: Sequence[int]
    ) -> None:
        """Lets later prompts and rows continue a completed call, whose row must be durable."""
        tokens = np.concatenate([indexed.prompt.ids, np.asarray(sampled_ids, dtype=np.int32)])
        continued, parent = indexed.continued, indexed.parent
        turns = (*indexed.conversation.turns, answer)
        if continued is not None:
            # Memory grows with a session, not with its square: equal turns and tokens are held once.
            shared = _common_turns(continued.turns, turns)
            turns = (*continued.turns[:shared], *turns[shared:])
            _move_tokens(continued, tokens)
        depth = 0 if parent is None else parent.depth + 1
        self._add(
            key,
            extended(indexed.chain[-1], answer),
            IndexedCall(
                call_id, turns, indexed.conversation.tools, tokens, len(sampled_ids), len(indexed.text),
                text_digest(indexed.text), depth, continued,
            ),
        )  # fmt: skip

    async def _read_unknown(
        self, key: AttemptKey, conversation: Conversation, chain: list[bytes], read: ReadCalls
    ) -> None:
        """Reads the attempt's calls where the conversation's last answer is unknown."""
        turns = conversation.turns
        last = next((end for end in range(len(turns), 0, -1) if turns[end - 1].role == "assistant"), None)
        attempt = self._attempts.get(key) or _Attempt()
        if last is None or chain[last] in attempt.by_conversation:
            return
        for stored in await read(list(attempt.calls)):
            text = self._model.render(*stored.conversation)
            self._add(
                key,
                extended(digest_chain(stored.conversation)[-1], stored.answer),
                IndexedCall(
                    stored.call_id, (*stored.conversation.turns, stored.answer), stored.conversation.tools,
                    np.concatenate([stored.prompt_ids, stored.sampled_ids]), len(stored.sampled_ids), len(text),
                    text_digest(text), stored.depth, None,
                ),
            )  # fmt: skip

    def _continued(
        self, attempt: _Attempt, conversation: Conversation, chain: list[bytes], text: str
    ) -> tuple[IndexedCall | None, str, bool]:
        """The latest call whose tokens this prompt can begin with, the text to encode after them, and whether the
        prompt is a fork: it holds a later answer whose tokens it cannot continue.
        """
        is_fork = False
        for end in range(len(chain) - 1, 0, -1):
            call = attempt.by_conversation.get(chain[end])
            if call is None:
                continue
            rest = self._after(call, end, conversation, text)
            if rest is not None:
                return call, rest, is_fork
            is_fork = True
        return None, text, is_fork

    def _after(self, call: IndexedCall, end: int, conversation: Conversation, text: str) -> str | None:
        """The text that follows the call's tokens; None where the template does not only append to its prompt."""
        closing = self._model.closing
        if closing is None or not call.sampled or text_digest(text[: call.text_length]) != call.text_digest:
            return None
        place = self._end_of_answer(call, end, conversation, text, closing)
        return None if place is None else self._unsampled(closing, int(call.tokens[-1])) + text[place:]

    def _end_of_answer(
        self, call: IndexedCall, end: int, conversation: Conversation, text: str, closing: str
    ) -> int | None:
        """The place in the whole text that ends the first `end` turns, the last of them the call's answer."""
        turns, tools, options = conversation
        upto = self._model.render(turns[:end], tools, options, add_generation_prompt=False)
        if text.startswith(upto) and upto.endswith(closing):
            return len(upto)
        # The template writes a last answer in another way than an earlier one, as Qwen3 and Phi do.
        start = None if end == len(turns) else self._model.start_of_turn(end, turns, tools, options, text)
        place = -1 if start is None else text.rfind(closing, call.text_length, start)
        if place < 0 or not _is_answer_text(turns[end - 1], text[call.text_length : place]):
            return None
        return place + len(closing)

    def _unsampled(self, closing: str, last: int) -> str:
        """The part of the closing that the model has not sampled itself; all of it after a length or a stop string."""
        if last not in self._model.tokenizer.eos_ids:
            return closing
        before, found, rest = closing.partition(self._model.tokenizer.decode([last]))
        return rest if found and not before.strip() else closing

    async def _encode(self, text: str, after: int | None) -> TokenIds:
        tokenizer = self._model.tokenizer
        if after is not None and after not in tokenizer.eos_ids:
            after = None
        if tokenizer.uncached_characters(text) < LONG_CHARACTERS:
            return tokenizer.encode(text, after=after)
        return await asyncio.to_thread(tokenizer.encode, text, after=after)

    def _add(self, key: AttemptKey, digest: bytes, call: IndexedCall) -> None:
        attempt = self._attempts.pop(key, None) or _Attempt()
        attempt.calls[call.call_id] = call
        attempt.by_conversation[digest] = call
        before = call.continued
        turns, tokens = (0, 0) if before is None else (len(before.turns), len(before.tokens))
        attempt.size_bytes += CALL_BYTES + call.tokens[tokens:].nbytes + sum(map(_turn_bytes, call.turns[turns:]))
        self._attempts[key] = attempt


def _parent(
    attempt: _Attempt, continued: IndexedCall | None, conversation: Conversation
) -> tuple[IndexedCall | None, int]:
    """The call that this call's row refers to, and how many turns both begin with.

    That is the call whose tokens are continued, or the recent one with which most turns are shared; none where the row
    is the sixteenth of its chain.
    """
    recent = [continued] if continued else list(attempt.calls.values())[: -RECENT_CALLS - 1 : -1]
    shared = [(_common_turns(call.turns, conversation.turns), call) for call in recent]
    same_tools = [(count, call) for count, call in shared if count and call.tools == conversation.tools]
    count, parent = max(same_tools, key=lambda pair: pair[0], default=(0, None))
    return (None, 0) if parent is None or parent.depth >= MAX_DEPTH else (parent, count)


def _move_tokens(call: IndexedCall | None, tokens: TokenIds) -> None:
    """Lets a call and those that it continues refer to the array of a longer call, which begins with their tokens."""
    while call is not None:
        call.tokens = tokens[: len(call.tokens)]
        call = call.continued


def _common(first: TokenIds, second: TokenIds) -> int:
    """How many tokens both begin with."""
    length = min(len(first), len(second))
    differs = np.flatnonzero(first[:length] != second[:length])
    return int(differs[0]) if len(differs) else length


def _common_turns(first: Sequence[Turn], second: Sequence[Turn]) -> int:
    """How many turns both begin with."""
    pairs = zip(first, second, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


def _turn_bytes(turn: Turn) -> int:
    return TURN_BYTES + len(turn.content) + sum(TURN_BYTES + len(call.arguments) for call in turn.tool_calls)


def _is_answer_text(answer: Turn, text: str) -> bool:
    """Whether a template wrote this text for an answer, but for white space and the spelling of tool calls."""
    text, content = text.strip(), answer.content.strip()
    if not answer.tool_calls:
        return text == content
    rest = text.removeprefix(content)
    return text.startswith(content) and all(call.name in rest for call in answer.tool_calls)


def digest_chain(conversation: Conversation) -> list[bytes]:
    """One digest per beginning of the conversation, from no turn to all: [turns + 1].

    Changes that agents make when they send an answer back do not count: ids and white space of tool arguments, the
    assistant's name, white space around its text.
    """
    chain = [_digest(orjson.dumps([conversation.tools, conversation.options], option=orjson.OPT_SORT_KEYS))]
    for turn in conversation.turns:
        chain.append(extended(chain[-1], turn))
    return chain


def extended(digest: bytes, turn: Turn) -> bytes:
    """The digest of a conversation, given that of all but its last turn."""
    if turn.role != "assistant":
        return _digest(digest + orjson.dumps([turn.role, turn.name, turn.content]))
    calls = [[call.name, parsed_arguments(call.arguments)] for call in turn.tool_calls]
    return _digest(digest + _dumps_any(["assistant", turn.content.strip(), calls]))


def text_digest(text: str) -> bytes:
    """A prompt's text in sixteen bytes."""
    return _digest(text.encode("utf-8", "surrogatepass"))


def _dumps_any(value: object) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        # Models sample integers beyond 64 bits and the like.
        return repr(value).encode()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
