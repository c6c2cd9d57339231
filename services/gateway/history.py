"""What was sampled is never encoded again: a later prompt begins with the tokens of the call that it continues.

A call is found by its conversation: the chain of digests over the turns it was asked, and its answer. Its tokens are
taken only if the text of the new prompt begins with the text of the old one, letter by letter (a template that rewrites
history, say by dropping earlier thoughts, does not). What the template writes after the answer is encoded alone and
appended. Where nothing can be continued, a new branch of the attempt's call forest begins: the prompt is encoded, from
where an earlier one was settled if it can be.

The store is the truth. The index in memory may be dropped at any moment: calls it lacks are read when a conversation
with an answer in it is not found, which also finds what another gateway served.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from leyden.services.gateway.digests import base_digest, chain_from, digest_chain, extended
from leyden.services.gateway.errors import ContextOverflow
from leyden.services.gateway.firsts import Firsts
from leyden.services.gateway.opening import Opening
from leyden.services.gateway.prompt import Added, Answered, Prompt, Recorded
from leyden.services.gateway.render import ChatModel
from leyden.services.gateway.request import ChatRequest, Turn
from leyden.services.gateway.tokens import TOKEN_BYTES, TokenIds, Tokens
from leyden.services.gateway.written import Conversation, Elsewhere, Encoded, Settled, Written, kept_bytes

MOST_UNKEPT = 4
"""So many last messages may be left out of later requests, and their answer is still known to be from here. The store
is not asked for it then: the same answer without these messages, of elsewhere or of before a restart, stays hidden."""
MOST_PIECES = 64
"""A text of more is encoded as one: each costs 4 µs beside its characters."""
LONG_CHARACTERS = 16_384
"""Beyond this a text takes milliseconds to encode."""
ATTEMPT_BYTES, CALL_BYTES, DIGEST_BYTES = 1200, 850, 120
"""What an attempt, a call and a digest cost beside tokens, measured: of short calls it is nearly everything."""
SETTLED_CONVERSATIONS, MOST_SETTLED_BYTES = 32, 2**26
"""Conversations of an attempt that are gone on with piece by piece, and their memory. Beyond either, those used last
are, and at least one; the others are read as a whole."""
AttemptKey = tuple[str, int]
"""Rollout id and attempt number."""
_NO_IDS: TokenIds = np.empty(0, dtype=np.int32)


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


class _Begun(NamedTuple):
    """What a prompt begins with, and the text that is left to encode.

    Args: tokens, sampled_ids: of the call `earlier`, whose answer is the last of `end` turns, or those of `Encoded`;
        after: the token before the text, where its spelling depends on it; pieces: of `Encoded`
    """

    tokens: Tokens
    sampled_ids: TokenIds
    text: str
    after: int | None
    earlier: Answered | None
    end: int
    pieces: Mapping[str, TokenIds]


@dataclass(slots=True)
class _Attempt:
    answered: dict[bytes, Answered] = field(default_factory=dict)
    call_ids: set[str] = field(default_factory=set)
    said: set[bytes] = field(default_factory=set)
    settled: list[Settled] = field(default_factory=list)
    size_bytes: int = ATTEMPT_BYTES


class History:
    """The answered calls of the attempts seen last, at most `max_bytes` in all; the least recently used go first."""

    def __init__(self, model: ChatModel, *, max_bytes: int) -> None:
        self._model = model
        self._max_bytes = max_bytes
        self._size_bytes = 0
        self._attempts: OrderedDict[AttemptKey, _Attempt] = OrderedDict()
        self._firsts = Firsts()

    def opening(self, key: AttemptKey, body: bytes) -> Opening | None:
        """The longest beginning of a body that is known from an earlier body of the attempt."""
        attempt = self._attempts.get(key)
        settled = () if attempt is None else attempt.settled
        known = (one.opening for one in settled if body.startswith(one.opening.raw))
        return max(known, key=lambda opening: len(opening.raw), default=None)

    async def prompt(self, key: AttemptKey, request: ChatRequest, read: ReadAnswers) -> Prompt:
        """The tokens to sample after.

        Raises: ContextOverflow: they leave no room for an answer; BadRequest: the template refuses the conversation
        """
        conversation = Conversation(request.turns, request.tools, request.template_options)
        base = base_digest(conversation)
        settled = self._settled_for(key, request, base)
        chain = chain_from([base] if settled is None else settled.chain, conversation.turns)
        last = next((end for end in range(len(request.turns), 0, -1) if _is_answer(request.turns[end - 1])), None)
        if last is None:
            encoded = None
            prompt, written = await self._first(key, conversation, chain)
        else:
            if not self._has_answered(key, chain[last]):
                await self._read(key, read)
            prompt, written, encoded = await self._later(key, conversation, chain, request, settled)
        self._check_room(prompt.tokens.length)
        recorded = self._recorded(key, request, settled)
        if request.opening is not None:
            now = written.settle(request.opening, chain, settled if last is None else None)
            now = replace(now, encoded=encoded or now.encoded, recorded=recorded)
            self._settle(key, now, request.continues)
        first = max((last or 0) + 1, len(request.turns) - MOST_UNKEPT)
        return replace(prompt, recorded=recorded, shorter=chain[first : len(request.turns)])

    def remember(
        self,
        key: AttemptKey,
        call_id: str,
        prompt: Prompt,
        answer: Turn,
        sampled_ids: TokenIds,
        *,
        added: Added | None = None,
    ) -> None:
        """Makes a completed call one that later prompts can continue, and later rows, too, where is told what its own
        holds: then that is durable.
        """
        sent, chain_bytes = (None, 0) if added is None else (added.sent, added.chain_bytes + sampled_ids.nbytes)
        answered = Answered(
            call_id,
            prompt.tokens,
            sampled_ids,
            prompt.characters,
            prompt.text_digest,
            None if sent is None else sent.sha256,
            chain_bytes,
        )
        self._add(key, extended(prompt.conversation_digest, answer), answered)
        attempt = self._attempt(key)
        attempt.said.update(extended(digest, answer) for digest in prompt.shorter)
        self._take(attempt, DIGEST_BYTES * len(prompt.shorter))
        if added is not None and sent is not None and sent.opening is not None:
            count, end = len(sent.opening.turns), sent.opening.end
            recorded = Recorded(call_id, prompt.tokens, sent.tools, count, end, chain_bytes)
            self._keep(key, sent.opening, recorded, is_whole=added.continues is None)

    async def _first(self, key: AttemptKey, conversation: Conversation, chain: list[bytes]) -> tuple[Prompt, Written]:
        """A prompt without an answer in it."""
        found = self._firsts.find(conversation) if self._model.is_timeless else None
        if found is not None:
            return found
        prompt, written, _ = await self._prompt(key, conversation, chain)
        if self._model.is_timeless:
            self._firsts.add(conversation, prompt, written)
        return prompt, written

    def _has_answered(self, key: AttemptKey, digest: bytes) -> bool:
        """Whether an answer ends this conversation that was given here, be it to some more messages."""
        attempt = self._attempt(key)
        return digest in attempt.answered or digest in attempt.said

    async def _later(
        self,
        key: AttemptKey,
        conversation: Conversation,
        chain: list[bytes],
        request: ChatRequest,
        settled: Settled | None,
    ) -> tuple[Prompt, Written, Encoded | None]:
        usable = settled if settled is None or settled.messages is not None else None
        try:
            return await self._prompt(key, conversation, chain, usable, request.opening)
        except Elsewhere:
            return await self._prompt(key, conversation, chain, None, request.opening)

    async def _prompt(
        self,
        key: AttemptKey,
        conversation: Conversation,
        chain: list[bytes],
        settled: Settled | None = None,
        opening: Opening | None = None,
    ) -> tuple[Prompt, Written, Encoded | None]:
        """The prompt, and what is known of the tokens that an opening settles.

        Raises: Elsewhere: the tokens are to be found without what is settled
        """
        written = Written(self._model, conversation, settled)
        begun, is_fork = self._begun(key, conversation, chain, written, settled)
        tokens, encoded = await self._finished(begun, written, opening)
        tokens = self._held(key, begun.tokens, tokens)
        prompt = Prompt(tokens, written.characters, written.digest(), chain[-1], begun.earlier, is_fork)
        return prompt, written, encoded

    async def _encoded(self, texts: Sequence[str], after: int | None = None) -> list[TokenIds]:
        encode = partial(self._model.encode, after=after)
        if sum(map(len, texts)) < LONG_CHARACTERS:
            return list(map(encode, texts))
        # The tokenizer lets other threads run: a long prompt holds nobody else's stream.
        return await asyncio.to_thread(lambda: list(map(encode, texts)))

    async def _in_pieces(self, text: str, known: Mapping[str, TokenIds]) -> tuple[list[TokenIds], dict[str, TokenIds]]:
        """The tokens of a text's pieces in their order, and each with its tokens; those known are not encoded again."""
        pieces = self._model.cuts.pieces(text)
        if len(pieces) > MOST_PIECES:
            return await self._encoded([text]), {}
        new = [piece for piece in dict.fromkeys(pieces) if piece not in known]
        found = {**known, **dict(zip(new, await self._encoded(new), strict=True))}
        return [found[piece] for piece in pieces], {piece: found[piece] for piece in pieces}

    async def _read(self, key: AttemptKey, read: ReadAnswers) -> None:
        tokens = Tokens.of(_NO_IDS)
        for stored in await read(self._attempt(key).call_ids):
            written = Written(self._model, stored.conversation)
            tokens = tokens.or_longer(stored.prompt_ids)
            answered = Answered(stored.call_id, tokens, stored.sampled_ids, written.characters, written.digest(), None)
            self._add(key, extended(digest_chain(stored.conversation)[-1], stored.answer), answered)

    def _begun(
        self,
        key: AttemptKey,
        conversation: Conversation,
        chain: list[bytes],
        written: Written,
        settled: Settled | None,
    ) -> tuple[_Begun, bool]:
        """What the prompt has of the latest call that it can continue, and whether there is a later one that it cannot.

        Raises: Elsewhere
        """
        answered = self._attempt(key).answered
        is_fork = False
        for end in range(len(chain) - 1, written.first, -1):
            call = answered.get(chain[end]) if _is_answer(conversation.turns[end - 1]) else None
            if call is None:
                continue
            begun = self._after(call, written, end)
            if begun is not None:
                return begun, is_fork
            is_fork = True
        if settled is None:
            return _Begun(Tokens.of(_NO_IDS), _NO_IDS, written.rest, None, None, 0, {}), is_fork
        known = settled.encoded
        if is_fork or known is None or not _is_latest(known, answered, chain[: written.first + 1]):
            raise Elsewhere
        text = known.rest + written.rest
        if self._model.cuts.last(text, 0) is None:
            # What began at the cut is written otherwise now.
            raise Elsewhere
        return _Begun(known.tokens, _NO_IDS, text, None, known.earlier, known.end, known.pieces), False

    def _after(self, call: Answered, written: Written, end: int) -> _Begun | None:
        """The call's tokens and the text after its answer; None where the template does not only append."""
        closing = self._model.closing
        if closing is None or not written.begins_with(call.prompt_characters, call.prompt_digest):
            return None
        following = written.after(end, closing, call.prompt_characters)
        if following is None:
            return None
        last = int(call.sampled_ids[-1]) if len(call.sampled_ids) else None
        rest, after = self._unsampled_closing(closing, last)
        return _Begun(call.prompt, call.sampled_ids, rest + following, after, call, end, {})

    async def _finished(
        self, begun: _Begun, written: Written, opening: Opening | None
    ) -> tuple[Tokens, Encoded | None]:
        """All tokens, and those of the text that an opening settles where its last answer comes after `begun`."""
        text, upto = begun.text, _settled_part(begun, written, opening)
        cut = None if upto is None else self._model.cuts.last(text, upto)
        if begun.pieces:
            first, _ = await self._in_pieces(text[:cut], begun.pieces)
        else:
            first = await self._encoded([text[:cut]], begun.after)
        second, pieces = ([], {}) if cut is None else await self._in_pieces(text[cut:], begun.pieces)
        # Before they take room beside those of the call.
        count = begun.tokens.length + sum(map(len, (begun.sampled_ids, *first, *second)))
        self._check_room(count)
        tokens = begun.tokens.followed_by(begun.sampled_ids, *first)
        if cut is None:
            return tokens, None
        rest = text[cut:upto]
        size_bytes = kept_bytes([rest, *pieces, *pieces.values()]) + TOKEN_BYTES * tokens.length
        encoded = Encoded(tokens, rest, begun.earlier, begun.end, pieces, size_bytes)
        whole = tokens.ended_by(*second)
        return replace(whole, added_bytes=tokens.added_bytes + whole.added_bytes), encoded

    def _held(self, key: AttemptKey, continued: Tokens, tokens: Tokens) -> Tokens:
        """The tokens, counted already where they lie in memory that is kept for those continued, answered or not."""
        if not continued.length or not tokens.shares(continued):
            return tokens
        self._take(self._attempt(key), tokens.added_bytes - tokens.end_bytes)
        return replace(tokens, added_bytes=tokens.end_bytes)

    def _check_room(self, tokens: int) -> None:
        # Engines keep one place of the context for themselves.
        if tokens + 1 >= self._model.context_length:
            raise ContextOverflow(self._model.context_length, tokens)

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

    def _add(self, key: AttemptKey, digest: bytes, answered: Answered) -> None:
        attempt = self._attempt(key)
        attempt.answered[digest] = answered
        attempt.call_ids.add(answered.call_id)
        self._take(attempt, answered.prompt.added_bytes + answered.sampled_ids.nbytes + CALL_BYTES)

    def _settled_for(self, key: AttemptKey, request: ChatRequest, base: bytes) -> Settled | None:
        """What the opening that the request continues has become, under the same tools and options."""
        settled = (one for one in self._attempt(key).settled if one.opening == request.continues)
        return next((one for one in settled if one.chain[0] == base), None)

    def _settle(self, key: AttemptKey, settled: Settled, continues: Opening | None) -> None:
        """Keeps what is settled, in place of what it goes on from, as the one used last."""
        attempt = self._attempt(key)
        kept = [one for one in attempt.settled if one.opening not in (continues, settled.opening)]
        kept = _latest([*kept, settled])
        added = sum(one.size_bytes for one in kept) - sum(one.size_bytes for one in attempt.settled)
        attempt.settled = kept
        self._take(attempt, added)

    def _recorded(self, key: AttemptKey, request: ChatRequest, settled: Settled | None) -> Recorded | None:
        """The recorded call that has most of the messages with which a request begins.

        Args: settled: what the request went on from; another one may have taken its place since
        """
        openings = (request.opening, request.continues)
        begun = [one for one in self._attempt(key).settled if one.opening in openings]
        begun += [] if settled is None else [settled]
        recorded = (one.recorded for one in begun if one.recorded is not None)
        return max(recorded, key=lambda one: one.end, default=None)

    def _keep(self, key: AttemptKey, opening: Opening, recorded: Recorded, *, is_whole: bool) -> None:
        """Lets later rows continue the first call that is recorded of those with an opening, or the last whole one: it
        could not continue the other.
        """
        attempt = self._attempt(key)
        for place, one in enumerate(attempt.settled):
            is_longer = one.recorded is None or one.recorded.end < recorded.end
            if one.opening == opening and (is_whole or is_longer):
                attempt.settled[place] = replace(one, recorded=recorded)
                self._take(attempt, attempt.settled[place].size_bytes - one.size_bytes)

    def _take(self, attempt: _Attempt, size_bytes: int) -> None:
        attempt.size_bytes += size_bytes
        self._grow(size_bytes)

    def _grow(self, size_bytes: int) -> None:
        self._size_bytes += size_bytes
        while self._size_bytes > self._max_bytes and len(self._attempts) > 1:
            _, dropped = self._attempts.popitem(last=False)
            self._size_bytes -= dropped.size_bytes


def _latest(settled: list[Settled]) -> list[Settled]:
    """Those at the end of the list that may be kept."""
    sizes = accumulate(one.size_bytes for one in reversed(settled[-SETTLED_CONVERSATIONS:]))
    count = sum(size_bytes <= MOST_SETTLED_BYTES for size_bytes in sizes)
    return settled[-max(1, count) :]


def _settled_part(begun: _Begun, written: Written, opening: Opening | None) -> int | None:
    """How much of the text an opening settles; None where nothing, as its last answers are those that are continued."""
    if opening is None or begun.end >= len(opening.turns):
        return None
    settled = written.settled_characters(opening)
    upto = None if settled is None else settled + len(begun.text) - len(written.rest)
    return None if upto is None or upto < 0 else upto


def _is_latest(known: Encoded, answered: Mapping[bytes, Answered], chain: list[bytes]) -> bool:
    """Whether a search through the settled turns would find what is known to be continued."""
    found = answered.get(chain[known.end]) if known.end else None
    return found is known.earlier and answered.keys().isdisjoint(chain[known.end + 1 :])


def _is_answer(turn: Turn) -> bool:
    return turn.role == "assistant"
