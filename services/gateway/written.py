"""A conversation as the chat template writes it, of which the beginning need not be written again.

What an earlier call has settled of a conversation is known by its length and digest: nothing has to read it again in
order to see that it has not changed.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import orjson

from leyden.services.gateway.opening import Opening, divides_results
from leyden.services.gateway.prompt import Answered, Recorded
from leyden.services.gateway.render import ChatModel
from leyden.services.gateway.request import Json, ToolCall, Turn
from leyden.services.gateway.tail import Reached, Tail
from leyden.services.gateway.tokens import TokenIds, Tokens

SETTLED_BYTES, TURN_BYTES = 1000, 100
"""What is kept of an opening and of each of its turns beside its bytes and the turns themselves, measured."""


class Elsewhere(Exception):
    """What was asked lies before the part that is written."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What an answer depends on: turns, tools and template options."""

    turns: tuple[Turn, ...]
    tools: tuple[Json, ...]
    options: Json


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens of a settled text, with which every prompt begins that goes on from it, as long as no later answer among
    its turns is known.

    Args: tokens: of the text up to a cut; rest: the text after it; earlier: the call that the tokens continue, whose
        answer is the last of `end` turns; None and 0 where they continue none; pieces: tokens of the pieces that the
        rest and what followed it were; size_bytes: memory
    """

    tokens: Tokens
    rest: str
    earlier: Answered | None
    end: int
    pieces: dict[str, TokenIds]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Settled:
    """What an opening's turns have become, under the tools and options of `chain[0]`.

    Args: chain: digests of the conversation's beginnings, from no turn to all of the opening's; messages: as the
        template gets them, None where it writes only whole conversations; reached: the template before the last of
        them; characters, digest: of the text before that one; given: digest of tools and options as they are spelled;
        kept_bytes: memory of the turns and messages; encoded: what is known of that text's tokens, beside those of
        calls whose answer comes later; recorded: a call that has all or some of the opening's messages
    """

    opening: Opening
    chain: list[bytes]
    messages: list[Json] | None
    reached: Reached | None
    characters: int
    digest: hashlib.blake2b
    given: bytes
    kept_bytes: int
    encoded: Encoded | None = None
    recorded: Recorded | None = None

    @property
    def size_bytes(self) -> int:
        """Memory."""
        encoded = 0 if self.encoded is None else self.encoded.size_bytes
        tools = 0 if self.recorded is None else len(self.recorded.tools)
        opening = len(self.opening.raw) + TURN_BYTES * len(self.opening.turns)
        return SETTLED_BYTES + opening + self.kept_bytes + encoded + tools


class Written:
    """The text of a conversation that asks for an answer.

    Args: settled: what is known of its beginning, with messages; what stands before the last of them is not written
    Raises: BadRequest: the template refuses the conversation; Elsewhere: it cannot be written after what is settled
    """

    def __init__(self, model: ChatModel, conversation: Conversation, settled: Settled | None = None) -> None:
        self._model = model
        self._conversation = conversation
        self._settled = settled
        self._known = [] if settled is None or settled.messages is None else settled.messages
        self._reached = None if settled is None else settled.reached
        self._characters = 0 if settled is None else settled.characters
        self._digest = hashlib.blake2b(digest_size=16) if settled is None else settled.digest
        self.first = 0 if settled is None else len(settled.opening.turns)
        """The first turn that is not settled."""
        self._given = given_digest(conversation)
        if settled is not None and (settled.given != self._given or divides_results(conversation.turns, self.first)):
            raise Elsewhere
        self._messages = self._spelled(len(conversation.turns))
        self._tail = self._written(self._messages, is_question=True)
        self.rest = self._text(self._tail, len(conversation.turns), is_question=True)
        """The text from the settled part on."""

    @property
    def characters(self) -> int:
        """Of the whole text."""
        return self._characters + len(self.rest)

    @property
    def size_bytes(self) -> int:
        """Memory: what the template leaves out is kept, too."""
        asked = self._conversation
        texts = [] if self._tail is None else [self._tail.before, *self._tail.texts]
        return kept_bytes([asked.turns, asked.tools, asked.options, self._messages, texts, self.rest])

    def digest(self) -> bytes:
        """Of the whole text."""
        return _continued(self._digest, self.rest).digest()

    def begins_with(self, characters: int, digest: bytes) -> bool:
        """Whether a text of this length and digest is its beginning.

        Raises: Elsewhere
        """
        if characters < self._characters:
            raise Elsewhere
        return _continued(self._digest, self.rest[: characters - self._characters]).digest() == digest

    def after(self, end: int, closing: str, asked: int) -> str | None:
        """What follows the first `end` turns, the last of them an answer; None where its text is not kept as it is.

        Args: closing: with which the text of an answer ends; asked: characters of the prompt that was answered
        """
        answer = len(self._spelled(end)) - 1
        if self._tail is not None and answer < len(self._messages) - 1:
            so_far = self._shown(self._tail, self._tail.texts[: answer + 1 - self._start])
            said = so_far[asked - self._characters :]
            if said.endswith(closing) and _is_kept(self._conversation.turns[end - 1], said.removesuffix(closing)):
                return self.rest[len(so_far) :]
        # Its spelling is the template's own: then it is kept if it is the same as of a conversation that ends with it.
        tail = None if self._tail is None else self._written(self._spelled(end), is_question=False)
        so_far = self._text(tail, end, is_question=False)
        if not self.rest.startswith(so_far) or not so_far.endswith(closing):
            return None
        return self.rest[len(so_far) :]

    def settled_characters(self, opening: Opening) -> int | None:
        """How much of `rest` an opening settles, as for `settle`; None where nothing can be gone on from."""
        last = len(self._spelled(len(opening.turns))) - 1
        if self._tail is None or self._tail.reached(last) is None:
            return None
        return len(self._shown(self._tail, self._tail.texts[: last - self._start]))

    def settle(self, opening: Opening, chain: list[bytes], known: Settled | None = None) -> Settled:
        """What later conversations that begin with an opening need not write again.

        Args: opening: of this conversation, and of no fewer turns than were settled; chain: as in `Settled`, or longer;
            known: what is settled of it already, for what is written without that
        """
        for settled in (self._settled, known):
            if settled is not None and settled.opening == opening and settled.given == self._given:
                return settled
        count = len(opening.turns)
        messages, turns = self._messages[: len(self._spelled(count))], self._conversation.turns[self.first : count]
        # The text of a message may depend on the next one, which need not be the same later.
        reached = None if self._tail is None else self._tail.reached(len(messages) - 1)
        if self._tail is None or reached is None:
            kept = kept_bytes(self._conversation.turns[:count])
            return Settled(opening, chain[: count + 1], None, None, 0, self._digest, self._given, kept)
        text = self._shown(self._tail, self._tail.texts[: len(messages) - 1 - self._start])
        digest, characters = _continued(self._digest, text), self._characters + len(text)
        kept = kept_bytes([*turns, *messages[len(self._known) :]])
        kept += 0 if self._settled is None else self._settled.kept_bytes
        return Settled(opening, chain[: count + 1], messages, reached, characters, digest, self._given, kept)

    def _spelled(self, end: int) -> list[Json]:
        """The messages of the first `end` turns."""
        tools = self._conversation.tools if self.first == 0 else ()
        return [*self._known, *self._model.messages(self._conversation.turns[self.first : end], tools)]

    @property
    def _start(self) -> int:
        """The first message that is not settled."""
        return 0 if self._reached is None else self._reached.start

    def _written(self, messages: list[Json], *, is_question: bool) -> Tail | None:
        asked = self._conversation
        return self._model.render_from(
            messages, self._reached, asked.tools, asked.options, add_generation_prompt=is_question
        )

    def _text(self, tail: Tail | None, end: int, *, is_question: bool) -> str:
        """The text of the first `end` turns from the settled part on.

        Raises: Elsewhere; BadRequest
        """
        if tail is not None:
            return self._shown(tail, tail.texts)
        if self._settled is not None:
            raise Elsewhere
        asked = self._conversation
        return self._model.render(asked.turns[:end], asked.tools, asked.options, add_generation_prompt=is_question)

    def _shown(self, tail: Tail, texts: Sequence[str]) -> str:
        """Texts after what stands before all of them, where that is not settled."""
        return "".join(texts if self._settled is not None else [tail.before, *texts])


def given_digest(conversation: Conversation) -> bytes:
    """Digest of tools and options as they are spelled: a template may write members in their order, which a
    conversation's digests do not tell.
    """
    return hashlib.blake2b(orjson.dumps([conversation.tools, conversation.options]), digest_size=16).digest()


def kept_bytes(values: Iterable[object]) -> int:
    """Memory of JSON values and turns, what several of them share counted once."""
    seen: set[int] = set()
    size, left = 0, list(values)
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        size += sys.getsizeof(value)
        if type(value) is str:
            continue
        if isinstance(value, dict):
            left.extend(value)
            left.extend(value.values())
        elif isinstance(value, list | tuple):
            left.extend(value)
        elif isinstance(value, Turn):
            left += value.content, value.name, value.tool_calls, value.tool_call_id
        elif isinstance(value, ToolCall):
            left += value.id, value.name, value.arguments
    return size


def _is_kept(answer: Turn, text: str) -> bool:
    """Whether a text after the prompt is what was answered, but for white space and the spelling of tool calls."""
    text, content = text.strip(), answer.content.strip()
    if not answer.tool_calls:
        return text == content
    rest = text.removeprefix(content)
    return text.startswith(content) and all(call.name in rest for call in answer.tool_calls)


def _continued(digest: hashlib.blake2b, text: str) -> hashlib.blake2b:
    longer = digest.copy()
    longer.update(text.encode("utf-8", "surrogatepass"))
    return longer
