"""First prompts: siblings of a group begin with the same conversation, which is written and encoded once."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from leyden.services.gateway.prompt import Prompt
from leyden.services.gateway.tokens import TOKEN_BYTES
from leyden.services.gateway.written import Conversation, Written, given_digest

FIRSTS_BYTES = 8 * 2**20
"""What the first prompts take that are remembered."""
FIRST_BYTES = 3500
"""What each of them takes beside its conversation, text and tokens, measured."""


class Firsts:
    """Prompts without an answer in them, at most `FIRSTS_BYTES` in all; the least recently used go first."""

    def __init__(self) -> None:
        self._known: OrderedDict[object, tuple[Prompt, Written, int]] = OrderedDict()
        self._size_bytes = 0

    def find(self, conversation: Conversation) -> tuple[Prompt, Written] | None:
        """The prompt of a conversation, whose tokens others follow in memory of their own."""
        asked = _asked(conversation)
        if asked not in self._known:
            return None
        self._known.move_to_end(asked)
        prompt, written, _ = self._known[asked]
        return replace(prompt, tokens=prompt.tokens.apart()), written

    def add(self, conversation: Conversation, prompt: Prompt, written: Written) -> None:
        """Remembers a prompt, if it is not too large."""
        asked = _asked(conversation)
        size_bytes = FIRST_BYTES + TOKEN_BYTES * prompt.tokens.length + written.size_bytes
        if asked in self._known or size_bytes > FIRSTS_BYTES:
            return
        self._known[asked] = replace(prompt, tokens=prompt.tokens.apart()), written, size_bytes
        self._size_bytes += size_bytes
        while self._size_bytes > FIRSTS_BYTES:
            _, (_, _, dropped_bytes) = self._known.popitem(last=False)
            self._size_bytes -= dropped_bytes


def _asked(conversation: Conversation) -> object:
    """Its turns, and the digest of its tools and options."""
    return conversation.turns, given_digest(conversation)
