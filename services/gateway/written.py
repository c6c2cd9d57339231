"""A conversation as the chat template writes it, of which the beginning need not be written again.

What an earlier call has settled of a conversation is known by its length and digest: nothing has to read it again in
order to see that it has not changed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from services.gateway.opening import Opening
from services.gateway.render import ChatModel
from services.gateway.request import Json, Turn

SETTLED_BYTES, TURN_BYTES = 1000, 500
"""What is kept of an opening and of each of its turns beside their text, measured."""


class Elsewhere(Exception):
    """What was asked lies before the part that is written."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What an answer depends on: turns, tools and template options."""

    turns: tuple[Turn, ...]
    tools: tuple[Json, ...]
    options: Json


@dataclass(frozen=True, slots=True)
class Settled:
    """What an opening's turns have become, under the tools and options of `chain[0]`.

    Args: chain: digests of the conversation's beginnings, from no turn to all of the opening's; messages: as the
        template gets them, None where it writes only whole conversations; characters, digest: of the text before the
        last of the messages
    """

    opening: Opening
    chain: list[bytes]
    messages: list[Json] | None
    characters: int
    digest: hashlib.blake2b

    @property
    def size_bytes(self) -> int:
        """Memory: the text is kept as bytes and in the turns."""
        return SETTLED_BYTES + 2 * len(self.opening.raw) + TURN_BYTES * len(self.opening.turns)


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
        self._characters = 0 if settled is None else settled.characters
        self._digest = hashlib.blake2b(digest_size=16) if settled is None else settled.digest
        self.first = 0 if settled is None else len(settled.opening.turns)
        """The first turn that is not settled."""
        self._messages = self._spelled(len(conversation.turns))
        parts = self._parts(self._messages, add_generation_prompt=True)
        self._split = parts or []
        self.rest = "".join(parts) if parts is not None else self._whole(len(conversation.turns), is_question=True)
        """The text from the settled part on."""

    @property
    def characters(self) -> int:
        """Of the whole text."""
        return self._characters + len(self.rest)

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

    def after(self, end: int, closing: str) -> str | None:
        """What follows the first `end` turns, the last of them an answer; None where its text is not kept as it is.

        Args: closing: with which the text of an answer ends
        """
        parts = self._parts(self._spelled(end), add_generation_prompt=False)
        so_far = "".join(parts) if parts is not None else self._whole(end, is_question=False)
        if not self.rest.startswith(so_far) or not so_far.endswith(closing):
            return None
        return self.rest[len(so_far) :]

    def settle(self, opening: Opening, chain: list[bytes]) -> Settled:
        """What later conversations that begin with an opening need not write again.

        Args: opening: of this conversation, and of no fewer turns than were settled; chain: as in `Settled`, or longer
        """
        if self._settled is not None and self._settled.opening is opening:
            return self._settled
        count = len(opening.turns)
        if not self._split:
            return Settled(opening, chain[: count + 1], None, 0, self._digest)
        messages = self._messages[: len(self._spelled(count))]
        # The text of a message may depend on the next one, which need not be the same later.
        text = "".join(self._split[: len(messages) - len(self._known)])
        digest = _continued(self._digest, text)
        return Settled(opening, chain[: count + 1], messages, self._characters + len(text), digest)

    def _spelled(self, end: int) -> list[Json]:
        """The messages of the first `end` turns."""
        tools = self._conversation.tools if self.first == 0 else ()
        return [*self._known, *self._model.messages(self._conversation.turns[self.first : end], tools)]

    def _parts(self, messages: list[Json], *, add_generation_prompt: bool) -> list[str] | None:
        """The texts of the messages that are not settled, after what stands before all where nothing is settled."""
        parts = self._model.render_from(
            messages,
            max(0, len(self._known) - 1),
            self._conversation.tools,
            self._conversation.options,
            add_generation_prompt=add_generation_prompt,
        )
        return parts if parts is None or self._settled is None else parts[1:]

    def _whole(self, end: int, *, is_question: bool) -> str:
        if self._settled is not None:
            raise Elsewhere
        asked = self._conversation
        return self._model.render(asked.turns[:end], asked.tools, asked.options, add_generation_prompt=is_question)


def _continued(digest: hashlib.blake2b, text: str) -> hashlib.blake2b:
    longer = digest.copy()
    longer.update(text.encode("utf-8", "surrogatepass"))
    return longer
