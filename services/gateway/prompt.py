"""A prompt ready for the engine, and a completed call as later prompts continue it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from libs.store.calls import JsonText
from services.gateway.sent import Sent
from services.gateway.tokens import TokenIds, Tokens


@dataclass(frozen=True, slots=True)
class Answered:
    """A completed call as later prompts need it: its exact tokens, and length and digest of its prompt's text.

    `sent_sha256`: of what it was sent, as `Sent.sha256`; None where that is not known
    """

    call_id: str
    prompt: Tokens
    sampled_ids: TokenIds
    prompt_characters: int
    prompt_digest: bytes
    sent_sha256: bytes | None


class Added(NamedTuple):
    """What a row holds of its call: messages and prompt tokens after those of the call that it continues, or all."""

    continues: str | None
    messages: JsonText
    ids: TokenIds


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt ready for the engine.

    `earlier`: the call whose prompt and sampled tokens it begins with; `is_fork`: it continues answers of this attempt,
    but not their tokens
    """

    tokens: Tokens
    characters: int
    text_digest: bytes
    conversation_digest: bytes
    earlier: Answered | None
    is_fork: bool

    @property
    def ids(self) -> TokenIds:
        """The tokens, read-only."""
        return self.tokens.ids

    def added(self, sent: Sent) -> Added:
        """What the row of a call that was sent this holds."""
        earlier = self.earlier
        if earlier is None or earlier.sent_sha256 is None or earlier.sent_sha256 != sent.opening_sha256:
            return Added(None, sent.whole(), self.ids)
        before = earlier.prompt.length + len(earlier.sampled_ids)
        return Added(earlier.call_id, sent.after_opening(), self.ids[before:])
