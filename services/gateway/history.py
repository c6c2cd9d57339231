"""What was sampled is never encoded again: a later prompt begins with the tokens of the call that it continues.

A call is found by its conversation: the chain of digests over the turns it was asked, and its answer. Its tokens are
taken only if the text of the new prompt begins with the text of the old one, letter by letter (a template that rewrites
history, say by dropping earlier thoughts, does not). What the template writes after the answer is encoded alone and
appended. Where nothing can be continued, the whole prompt is encoded: a new branch of the attempt's call forest.

The store is the truth. The index in memory may be dropped at any moment: calls it lacks are read when a conversation
with an answer in it is not found, which also finds what another gateway served.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import orjson

from services.gateway.errors import ContextOverflow
from services.gateway.render import ChatModel, TokenIds
from services.gateway.request import ChatRequest, Json, Turn, parsed_arguments

LONG_CHARACTERS = 16_384
"""Beyond this a text takes milliseconds to encode."""
ATTEMPT_BYTES, CALL_BYTES = 1000, 900
"""What an attempt and a call cost beside their tokens, measured: of short calls it is nearly everything."""
AttemptKey = tuple[str, int]
"""Rollout id and attempt number."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What an answer depends on: turns, tools and template options."""

    turns: tuple[Turn, ...]
    tools: tuple[Json, ...]
    options: Json


@dataclass(frozen=True, slots=True)
class Answered:
    """A completed call as later prompts need it: its exact tokens, and the digest of its prompt's text."""

    prompt_ids: TokenIds
    sampled_ids: TokenIds
    prompt_characters: int
    prompt_digest: bytes


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt ready for the engine. `is_fork`: it continues answers of this attempt, but not their tokens."""

    ids: TokenIds
    text: str
    conversation_digest: bytes
    is_fork: bool


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """A completed call as the store has it."""

    call_id: str
    conversation: Conversation
    answer: Turn
    prompt_ids: TokenIds
    sampled_ids: TokenIds


ReadAnswers = Callable[[Collection[str]], Awaitable[Sequence[StoredAnswer]]]
"""Completed calls of an attempt but those with these ids, oldest first."""


@dataclass(slots=True)
class _Attempt:
    answered: dict[bytes, Answered] = field(default_factory=dict)
    call_ids: set[str] = field(default_factory=set)
    size_bytes: int = ATTEMPT_BYTES


class History:
    """The answered calls of the attempts seen last, at most `max_bytes` in all; the least recently used go first."""

    def __init__(self, model: ChatModel, *, max_bytes: int) -> None:
        self._model = model
        self._max_bytes = max_bytes
        self._size_bytes = 0
        self._attempts: OrderedDict[AttemptKey, _Attempt] = OrderedDict()

    async def prompt(self, key: AttemptKey, request: ChatRequest, read: ReadAnswers) -> Prompt:
        """The tokens to sample after.

        Raises: ContextOverflow: they leave no room for an answer; BadRequest: the template refuses the conversation
        """
        conversation = Conversation(request.turns, request.tools, request.template_options)
        text = self._model.render(request.turns, request.tools, request.template_options, add_generation_prompt=True)
        chain = digest_chain(conversation)
        ends = [index + 1 for index, turn in enumerate(request.turns) if turn.role == "assistant"]
        if ends and chain[ends[-1]] not in self._attempt(key).answered:
            await self._read(key, read)
        ids, is_fork = await self._continued(key, conversation, text, chain, ends)
        if ids is None:
            ids = await self._encoded(text)
        # Engines keep one place of the context for themselves.
        if len(ids) + 1 >= self._model.context_length:
            raise ContextOverflow(self._model.context_length, len(ids))
        return Prompt(ids, text, chain[-1], is_fork)

    def remember(self, key: AttemptKey, call_id: str, prompt: Prompt, answer: Turn, sampled_ids: TokenIds) -> None:
        """Makes a completed call one that later prompts can continue."""
        answered = Answered(prompt.ids, sampled_ids, len(prompt.text), _text_digest(prompt.text))
        self._add(key, call_id, _extend(prompt.conversation_digest, answer), answered)

    async def _encoded(self, text: str, after: int | None = None) -> TokenIds:
        if len(text) < LONG_CHARACTERS:
            return self._model.encode(text, after=after)
        # The tokenizer lets other threads run: a long prompt holds nobody else's stream.
        return await asyncio.to_thread(self._model.encode, text, after=after)

    async def _read(self, key: AttemptKey, read: ReadAnswers) -> None:
        for stored in await read(self._attempt(key).call_ids):
            asked = stored.conversation
            text = self._model.render(asked.turns, asked.tools, asked.options, add_generation_prompt=True)
            answered = Answered(stored.prompt_ids, stored.sampled_ids, len(text), _text_digest(text))
            self._add(key, stored.call_id, _extend(digest_chain(asked)[-1], stored.answer), answered)

    async def _continued(
        self, key: AttemptKey, conversation: Conversation, text: str, chain: list[bytes], ends: list[int]
    ) -> tuple[TokenIds | None, bool]:
        """Tokens that begin with those of the latest call that can be continued, and whether a later one could not."""
        answered = self._attempt(key).answered
        is_fork = False
        for end in reversed(ends):
            call = answered.get(chain[end])
            if call is None:
                continue
            ids = await self._append(call, conversation, text, end)
            if ids is not None:
                return ids, is_fork
            is_fork = True
        return None, is_fork

    async def _append(self, call: Answered, conversation: Conversation, text: str, end: int) -> TokenIds | None:
        """The call's tokens and those of the text after its answer; None where the template does not only append."""
        closing = self._model.closing
        if closing is None or _text_digest(text[: call.prompt_characters]) != call.prompt_digest:
            return None
        turns = conversation.turns[:end]
        so_far = self._model.render(turns, conversation.tools, conversation.options, add_generation_prompt=False)
        if not text.startswith(so_far) or not so_far.endswith(closing):
            return None
        last = int(call.sampled_ids[-1]) if len(call.sampled_ids) else None
        rest, after = self._unsampled_closing(closing, last)
        appended = await self._encoded(rest + text[len(so_far) :], after)
        return np.concatenate([call.prompt_ids, call.sampled_ids, appended])

    def _unsampled_closing(self, closing: str, last: int | None) -> tuple[str, int | None]:
        """What of the closing the model has not sampled itself, and the sampled token that stands before it."""
        if last is None or last not in self._model.eos_ids:
            # Ended by length or by a stop string: the turn is closed for the model.
            return closing, None
        before, found, rest = closing.partition(self._model.decode([last]))
        return (rest, last) if found and not before.strip() else (closing, last)

    def _attempt(self, key: AttemptKey) -> _Attempt:
        attempt = self._attempts.get(key)
        if attempt is None:
            attempt = self._attempts[key] = _Attempt()
            self._grow(attempt.size_bytes)
        self._attempts.move_to_end(key)
        return attempt

    def _add(self, key: AttemptKey, call_id: str, digest: bytes, answered: Answered) -> None:
        attempt = self._attempt(key)
        size = answered.prompt_ids.nbytes + answered.sampled_ids.nbytes + CALL_BYTES
        attempt.answered[digest] = answered
        attempt.call_ids.add(call_id)
        attempt.size_bytes += size
        self._grow(size)

    def _grow(self, size_bytes: int) -> None:
        self._size_bytes += size_bytes
        while self._size_bytes > self._max_bytes and len(self._attempts) > 1:
            _, dropped = self._attempts.popitem(last=False)
            self._size_bytes -= dropped.size_bytes


def digest_chain(conversation: Conversation) -> list[bytes]:
    """One digest per prefix of the conversation, from no turn to all: [turns + 1].

    Spellings that agents change when they echo an answer do not count: ids and white space of tool arguments, the
    assistant's name, white space around its text.
    """
    base = orjson.dumps([conversation.tools, conversation.options], option=orjson.OPT_SORT_KEYS)
    chain = [_digest(base)]
    for turn in conversation.turns:
        chain.append(_extend(chain[-1], turn))
    return chain


def _extend(digest: bytes, turn: Turn) -> bytes:
    if turn.role != "assistant":
        return _digest(digest + orjson.dumps([turn.role, turn.name, turn.content]))
    calls = [[call.name, parsed_arguments(call.arguments)] for call in turn.tool_calls]
    return _digest(digest + _dumps_any(["assistant", turn.content.strip(), calls]))


def _dumps_any(value: object) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        # Integers beyond 64 bits and the like, which a model may well sample.
        return repr(value).encode()


def _text_digest(text: str) -> bytes:
    return _digest(text.encode("utf-8", "surrogatepass"))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
