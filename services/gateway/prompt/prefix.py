"""Finds the call whose tokens a prompt continues, so that sampled tokens are never encoded again.

A later prompt begins with the tokens of the call that it continues. The index finds that call by a chain of digests
over its turns and its answer. It reuses the call's tokens only if the new prompt's text begins with exactly the old
prompt's text (a template that drops earlier reasoning rewrites it). The gateway encodes the text that the template
writes after the answer and appends it. If no call can be continued, the gateway encodes the full prompt and starts a
new branch of the attempt's calls.

The index is a cache. If the conversation's last answer is not indexed, it reads the attempt's calls from the store.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import orjson
from cachetools import TTLCache

from leyden.libs.contracts.conversation import Json, Tool, Turn
from leyden.libs.contracts.states import Continuation
from leyden.services.gateway.calls.context import ModelRequest, Prompt
from leyden.services.gateway.prompt.rendering import Renderer, Rendering
from leyden.services.gateway.prompt.template import ChatModel
from leyden.services.gateway.prompt.tokenizer import TEXT_MARK, TokenIds
from leyden.services.gateway.prompt.tools.hermes import parsed_arguments
from leyden.services.gateway.prompt.tools.parsers import TOOL_PARSERS

RECENT_CALLS = 16
"""A new branch looks for its parent call among this many latest calls."""
LONG_CHARACTERS = 16_384
"""Texts with more uncached characters are encoded in a thread, because that takes milliseconds."""
IDLE_SECONDS = 300.0
"""An attempt without a call for so long is taken for ended."""
CALL_BYTES, TURN_BYTES = 1000, 300
"""Estimated memory of a call's and of a turn's objects, without their texts and tokens."""


class Conversation(NamedTuple):
    """The inputs of a chat template: turns, tools, and options."""

    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...]
    options: Json


@dataclass(frozen=True, slots=True)
class StoredCall:
    """A completed call read from the store."""

    call_id: str
    conversation: Conversation
    answer: Turn
    prompt_ids: TokenIds
    sampled_ids: TokenIds


@dataclass(slots=True, eq=False)
class IndexedCall:
    """A completed call that later prompts of its attempt can continue.

    `turns` ends with the answer, `tokens` with the sampled tokens; they begin with those of `continued`.
    `prompt_length`, `text_length` and `text_digest` describe the prompt's tokens and text. `is_shown`: the answer has
    all that was sampled, at least one token.
    """

    call_id: str
    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...]
    tokens: TokenIds
    prompt_length: int
    is_shown: bool
    text_length: int
    text_digest: bytes
    continued: IndexedCall | None


@dataclass(frozen=True, slots=True, eq=False)
class IndexedPrompt:
    """A prompt with the inputs of `PrefixIndex.remember`.

    `chain` is the conversation's `digest_chain`. The prompt begins with all tokens of `continued`.
    """

    prompt: Prompt
    conversation: Conversation
    text: str
    chain: list[bytes]
    continued: IndexedCall | None

    @property
    def continuation(self) -> Continuation:
        """Whether the prompt extends an earlier call, has lost the tokens of an answer, or starts afresh."""
        if self.prompt.is_fork:
            return Continuation.FORK
        return Continuation.FRESH if self.continued is None else Continuation.EXTEND


ReadCalls = Callable[[Collection[str]], Awaitable[Sequence[StoredCall]]]
"""Reads the completed calls of an attempt except those with these ids, oldest first."""


@dataclass(slots=True)
class _Attempt:
    by_conversation: dict[bytes, list[IndexedCall]] = field(default_factory=dict)
    """The calls of each conversation with its answer, oldest first; they differ in what the digests ignore."""
    asked: set[bytes] = field(default_factory=set)
    """The digests of the calls' prompts."""
    calls: dict[str, IndexedCall] = field(default_factory=dict)
    size_bytes: int = CALL_BYTES

    def find(self, digest: bytes, answer: Turn) -> IndexedCall | None:
        """Returns the call whose tool call ids or reasoning the agent sends back; else the latest one."""
        calls = self.by_conversation.get(digest, [])
        ids = [call.id for call in answer.tool_calls]
        by_ids = [one for one in calls if ids and [call.id for call in one.turns[-1].tool_calls] == ids]
        by_reasoning = [one for one in calls if _is_same_reasoning(answer, one.turns[-1])]
        return next((found[-1] for found in (by_ids, by_reasoning, calls) if found), None)


class PrefixCache(TTLCache[Hashable, _Attempt]):
    """The completed calls of recently used attempts, of all models of the process: at most `max_bytes` in all.

    An attempt leaves `idle_seconds` after its last call: otherwise the attempts that ended would fill `max_bytes`. One
    that goes on later is read from the store.
    """

    def __init__(
        self, max_bytes: int, *, idle_seconds: float = IDLE_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        # A TTLCache refuses an item larger than itself: a larger attempt counts as `max_bytes`.
        super().__init__(max_bytes, idle_seconds, clock, lambda attempt: min(attempt.size_bytes, max_bytes))


class PrefixIndex:
    """The calls of a cache that one model answered.

    Args: scope: tells this model's calls in the cache from those of others
    """

    def __init__(
        self, model: ChatModel, cache: PrefixCache, *, scope: Hashable = None, renderer: Renderer | None = None
    ) -> None:
        self._model = model
        self._cache = cache
        self._scope = scope
        self._renderer = renderer or Renderer()

    def _attempt(self, key: Hashable) -> _Attempt:
        return self._cache.get((self._scope, key)) or _Attempt()

    async def prompt(self, key: Hashable, request: ModelRequest, read: ReadCalls) -> IndexedPrompt:
        """Returns the request's prompt.

        Raises: BadRequest: the template refuses the conversation
        """
        conversation = Conversation(request.turns, request.tools, request.template_options)
        if request.raw_prompt is not None:
            return await self._raw(request.raw_prompt, conversation)
        conversation = conversation._replace(
            turns=tuple(self._model.read_reasoning(turn, request) for turn in request.turns)
        )
        chain = digest_chain(conversation)
        async with self._renderer.prompt(key) as rendering:
            await self._read_unknown(key, conversation, chain, read, rendering)
            attempt = self._attempt(key)
            conversation = _with_reasoning(attempt, conversation, chain)
            # Together: each change of threads waits for the interpreter's lock.
            text, continued, rest, is_fork = await rendering.run(self._rendered, attempt, conversation, chain)
        if continued is None:
            ids = await self._encode(text, None)
        else:
            ids = np.concatenate([continued.tokens, await self._encode(rest, int(continued.tokens[-1]))])
        parent, shared_turns = _parent(attempt, continued, conversation)
        shared_tokens = 0 if parent is None else _common(parent.tokens, ids)
        parent_call_id = None if parent is None else parent.call_id
        prompt = Prompt(ids, parent_call_id, shared_turns, shared_tokens, is_fork)
        return IndexedPrompt(prompt, conversation, text, chain, continued)

    async def whole(self, key: Hashable, request: ModelRequest) -> IndexedPrompt:
        """Returns the prompt of a request that another model answers, in this model's tokens; it continues no call.

        Raises: BadRequest: the template refuses the conversation
        """
        turns = tuple(self._model.read_reasoning(turn, request) for turn in request.turns)
        conversation = Conversation(turns, request.tools, request.template_options)
        async with self._renderer.prompt(key) as rendering:
            text = await rendering.run(self._model.render, *conversation)
        prompt = Prompt(await self._encode(text, None), None, 0, 0, is_fork=False)
        return IndexedPrompt(prompt, conversation, text, [], None)

    async def written(self, key: Hashable, indexed: IndexedPrompt, answer: Turn) -> TokenIds:
        """Returns the tokens that this model's template writes for an answer after the prompt, up to the end of the
        turn; none where it then writes another prompt, as templates that begin the reasoning for the model do.

        Raises: BadRequest: the template refuses the conversation
        """
        turns, tools, options = indexed.conversation
        render = partial(self._model.render, add_generation_prompt=False)
        async with self._renderer.prompt(key) as rendering:
            text = await rendering.run(render, (*turns, answer), tools, options)
        if not text.startswith(indexed.text):
            return np.zeros(0, np.int32)
        ids = await self._encode(text.removeprefix(indexed.text), None)
        ends = np.flatnonzero(np.isin(ids, list(self._model.tokenizer.eos_ids)))
        return ids[: ends[0] + 1] if len(ends) else ids

    async def _raw(self, prompt: str | Sequence[int], conversation: Conversation) -> IndexedPrompt:
        ids = await self._encode(prompt, None) if isinstance(prompt, str) else np.asarray(prompt, dtype=np.int32)
        return IndexedPrompt(Prompt(ids, None, 0, 0, is_fork=False), conversation, "", [], None)

    def remember(
        self, key: Hashable, call_id: str, indexed: IndexedPrompt, answer: Turn, sampled_ids: Sequence[int]
    ) -> None:
        """Indexes a completed call, whose row must be durable, for later prompts to continue."""
        tokens = np.concatenate([indexed.prompt.ids, np.asarray(sampled_ids, dtype=np.int32)])
        continued = indexed.continued
        turns = (*indexed.conversation.turns, answer)
        if continued is not None:
            # Calls of a session share their turns and tokens, so that memory grows linearly with the session.
            shared = _common_turns(continued.turns, turns)
            turns = (*continued.turns[:shared], *turns[shared:])
            _move_tokens(continued, tokens)
        self._add(
            key,
            indexed.chain[-1],
            answer,
            IndexedCall(
                call_id, turns, indexed.conversation.tools, tokens, len(indexed.prompt.ids),
                self._is_shown(answer, sampled_ids, indexed.conversation.tools),
                len(indexed.text), text_digest(indexed.text), continued,
            ),
        )  # fmt: skip

    async def _read_unknown(
        self, key: Hashable, conversation: Conversation, chain: list[bytes], read: ReadCalls, rendering: Rendering
    ) -> None:
        """Reads the attempt's calls from the store if the conversation's last answer is not indexed."""
        turns = conversation.turns
        last = next((end for end in range(len(turns), 0, -1) if turns[end - 1].role == "assistant"), None)
        attempt = self._attempt(key)
        if last is None or chain[last] in attempt.by_conversation:
            return
        for stored in await read(list(attempt.calls)):
            text = await rendering.anew().run(self._model.render, *stored.conversation)
            self._add(
                key,
                digest_chain(stored.conversation)[-1],
                stored.answer,
                IndexedCall(
                    stored.call_id, (*stored.conversation.turns, stored.answer), stored.conversation.tools,
                    np.concatenate([stored.prompt_ids, stored.sampled_ids]), len(stored.prompt_ids),
                    self._is_shown(stored.answer, stored.sampled_ids.tolist(), stored.conversation.tools), len(text),
                    text_digest(text), None,
                ),
            )  # fmt: skip

    def _is_shown(self, answer: Turn, sampled_ids: Sequence[int], tools: tuple[Tool, ...]) -> bool:
        # With `parallel_tool_calls` false the answer has the first of several sampled calls.
        tokenizer = self._model.tokenizer
        if len(answer.tool_calls) == 1:
            text = tokenizer.decode(tokenizer.visible(sampled_ids))
            parsers = (self._model.tool_parser, TOOL_PARSERS["hermes"])
            return all(len(parser.parse(text, tools)[1]) <= 1 for parser in parsers)
        return bool(len(sampled_ids))

    def _rendered(
        self, attempt: _Attempt, conversation: Conversation, chain: list[bytes]
    ) -> tuple[str, IndexedCall | None, str, bool]:
        text = self._model.render(*conversation)
        return text, *self._continued(attempt, conversation, chain, text)

    def _continued(
        self, attempt: _Attempt, conversation: Conversation, chain: list[bytes], text: str
    ) -> tuple[IndexedCall | None, str, bool]:
        """Returns the latest call whose tokens this prompt can begin with, the text to encode after them, and whether
        the prompt is a fork: it contains a later answer whose tokens it cannot reuse, or one that the agent rewrote.
        """
        is_fork = False
        for end in range(len(chain) - 1, 0, -1):
            call = attempt.find(chain[end], conversation.turns[end - 1])
            if call is None:
                is_fork |= conversation.turns[end - 1].role == "assistant" and chain[end - 1] in attempt.asked
                continue
            rest = self._after(call, end, conversation, text)
            if rest is not None:
                return call, rest, is_fork
            is_fork = True
        return None, text, is_fork

    def _after(self, call: IndexedCall, end: int, conversation: Conversation, text: str) -> str | None:
        """Returns the text after the call's tokens; None where the template has rewritten the call's prompt, where the
        agent sends other reasoning, or where the tokens have tool calls that the agent was not shown.
        """
        sampled, sent = call.turns[-1], conversation.turns[end - 1]
        last = int(call.tokens[-1])
        closing = self._model.closing_of(sampled, last)
        if closing is None or not call.is_shown or sent.reasoning != sampled.reasoning:
            return None
        if text_digest(text[: call.text_length]) != call.text_digest:
            return None
        place = self._end_of_answer(call, end, conversation, text, closing)
        return None if place is None else self._unsampled(closing + text[place:], last)

    def _end_of_answer(
        self, call: IndexedCall, end: int, conversation: Conversation, text: str, closing: str
    ) -> int | None:
        """Returns the position in the text after the first `end` turns, of which the last is the call's answer."""
        turns, tools, options = conversation
        answer = turns[end - 1]
        is_followed = end < len(turns) and turns[end].role != "assistant"
        # Why: the rendering below took 2 of the prompt's 5 ms (bench row "turn 100 of a session").
        if closing and is_followed:
            is_plain = answer.reasoning is None and not answer.tool_calls
            written = (answer.content if is_plain else self._sampled_text(call)) + closing
            if text.startswith(written, call.text_length):
                return call.text_length + len(written)
        upto = self._model.render(turns[:end], tools, options, add_generation_prompt=False)
        if text.startswith(upto) and upto.endswith(closing):
            return len(upto)
        # Some templates (Qwen3, Phi) render the conversation's last answer differently from earlier ones.
        start = None if end == len(turns) else self._model.start_of_turn(end, turns, tools, options, text)
        place = -1 if start is None else text.rfind(closing, call.text_length, start)
        if place < 0:
            return None
        shown = text[call.text_length : place].replace(TEXT_MARK, "")
        shows, rest = self._model.shows_reasoning(answer, shown)
        return place + len(closing) if shows and _is_answer_text(answer, rest) else None

    def _sampled_text(self, call: IndexedCall) -> str:
        tokenizer = self._model.tokenizer
        return tokenizer.decode(tokenizer.visible(call.tokens[call.prompt_length :].tolist()))

    def _unsampled(self, rest: str, last: int) -> str:
        """Returns the text after the sampled tokens, of which the last may be the end-of-turn token that begins it.

        GLM ends an answer with the mark of the next role.
        """
        if last not in self._model.tokenizer.eos_ids:
            return rest
        before, found, after = rest.partition(self._model.tokenizer.decode([last]))
        return after if found and not before.strip() else rest

    async def _encode(self, text: str, after: int | None) -> TokenIds:
        tokenizer = self._model.tokenizer
        if after is not None and after not in tokenizer.eos_ids:
            after = None
        if tokenizer.uncached_characters(text) < LONG_CHARACTERS:
            return tokenizer.encode(text, after=after)
        return await asyncio.to_thread(tokenizer.encode, text, after=after)

    def _add(self, key: Hashable, asked: bytes, answer: Turn, call: IndexedCall) -> None:
        attempt = self._cache.pop((self._scope, key), None) or _Attempt()
        attempt.calls[call.call_id] = call
        attempt.asked.add(asked)
        attempt.by_conversation.setdefault(extended(asked, answer), []).append(call)
        before = call.continued
        turns, tokens = (0, 0) if before is None else (len(before.turns), len(before.tokens))
        attempt.size_bytes += CALL_BYTES + call.tokens[tokens:].nbytes + sum(map(_turn_bytes, call.turns[turns:]))
        self._cache[self._scope, key] = attempt


def _with_reasoning(attempt: _Attempt, conversation: Conversation, chain: list[bytes]) -> Conversation:
    """Returns the conversation with the sampled reasoning of the answers that the agent sent back without it."""
    turns = list(conversation.turns)
    for index, turn in enumerate(turns):
        call = attempt.find(chain[index + 1], turn)
        if call is not None and (turn.reasoning is None or _is_same_reasoning(turn, call.turns[-1])):
            turns[index] = replace(turn, reasoning=call.turns[-1].reasoning)
    return conversation._replace(turns=tuple(turns))


def _is_same_reasoning(sent: Turn, sampled: Turn) -> bool:
    return (sent.reasoning or "").strip() == (sampled.reasoning or "").strip()


def _parent(
    attempt: _Attempt, continued: IndexedCall | None, conversation: Conversation
) -> tuple[IndexedCall | None, int]:
    """Returns the parent call of the new row, and the number of leading turns that both share.

    The parent is the continued call, or else the recent call with the most shared turns.
    """
    recent = [continued] if continued else list(attempt.calls.values())[: -RECENT_CALLS - 1 : -1]
    shared = [(_common_turns(call.turns, conversation.turns), call) for call in recent]
    same_tools = [(count, call) for count, call in shared if count and call.tools == conversation.tools]
    count, parent = max(same_tools, key=lambda pair: pair[0], default=(0, None))
    return parent, count


def _move_tokens(call: IndexedCall | None, tokens: TokenIds) -> None:
    """Replaces the token arrays of a call and its ancestors by views of a longer call's array that begins with them."""
    while call is not None:
        call.tokens = tokens[: len(call.tokens)]
        call = call.continued


def _common(first: TokenIds, second: TokenIds) -> int:
    """Returns the length of the longest common prefix of tokens."""
    length = min(len(first), len(second))
    differs = np.flatnonzero(first[:length] != second[:length])
    return int(differs[0]) if len(differs) else length


def _common_turns(first: Sequence[Turn], second: Sequence[Turn]) -> int:
    """Returns the length of the longest common prefix of turns."""
    pairs = zip(first, second, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


def _turn_bytes(turn: Turn) -> int:
    return (
        TURN_BYTES
        + len(turn.content)
        + len(turn.reasoning or "")
        + sum(TURN_BYTES + len(call.arguments) for call in turn.tool_calls)
    )


def _is_answer_text(answer: Turn, text: str) -> bool:
    """Whether the text is the rendered content and tool calls, ignoring white space and the format of the calls."""
    text, content = text.strip(), answer.content.strip()
    if not answer.tool_calls:
        return text == content
    rest = text.removeprefix(content)
    return text.startswith(content) and all(call.name in rest for call in answer.tool_calls)


def digest_chain(conversation: Conversation) -> list[bytes]:
    """Returns one digest for each prefix of the conversation, from no turn to all: [turns + 1].

    It ignores the changes that agents make when they send an answer back: tool call ids, white space in tool arguments,
    the assistant's name, white space around its text, reasoning that is left out.
    """
    chain = [_digest(orjson.dumps([conversation.tools, conversation.options], option=orjson.OPT_SORT_KEYS))]
    for turn in conversation.turns:
        chain.append(extended(chain[-1], turn))
    return chain


def extended(digest: bytes, turn: Turn) -> bytes:
    """Returns the digest of a conversation with one more turn."""
    if turn.role != "assistant":
        return _digest(digest + orjson.dumps([turn.role, turn.name, turn.content]))
    calls = [[call.name, parsed_arguments(call.arguments)] for call in turn.tool_calls]
    return _digest(digest + _dumps_any(["assistant", turn.content.strip(), calls]))


def text_digest(text: str) -> bytes:
    """Returns a 16-byte digest of a prompt's text."""
    return _digest(text.encode("utf-8", "surrogatepass"))


def _dumps_any(value: object) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        # orjson refuses some values that models sample, such as integers beyond 64 bits.
        return repr(value).encode()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
