"""A prompt ready for the engine, and a completed call as later prompts continue it."""

from __future__ import annotations

from collections.abc import Sequence
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


@dataclass(frozen=True, slots=True)
class Recorded:
    """A call with a durable row, whose messages begin as those of other calls do.

    Args: prompt: its tokens; tools: as `Sent.tools`; count, end: of the messages that both have, stored as they were
        sent, `end` as in `Opening`
    """

    call_id: str
    prompt: Tokens
    tools: bytes
    count: int
    end: int


class Added(NamedTuple):
    """What a row holds of its call: messages and prompt tokens after what it keeps of the call that it continues.

    Kept are all messages and tokens where no number is told; what continues no call holds all.
    """

    continues: str | None
    messages: JsonText
    ids: TokenIds
    kept_messages: int | None = None
    kept_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt ready for the engine.

    `earlier`: the call whose prompt and sampled tokens it begins with; `is_fork`: it continues answers of this attempt,
    but not their tokens; `recorded`: a call with which it shares its first messages; `shorter`: digests of the
    conversation without its last messages, which later requests may leave out
    """

    tokens: Tokens
    characters: int
    text_digest: bytes
    conversation_digest: bytes
    earlier: Answered | None
    is_fork: bool
    recorded: Recorded | None = None
    shorter: Sequence[bytes] = ()

    @property
    def ids(self) -> TokenIds:
        """The tokens, read-only."""
        return self.tokens.ids

    def added(self, sent: Sent) -> Added:
        """What the row of a call that was sent this holds."""
        earlier, recorded = self.earlier, self.recorded
        if earlier is not None and sent.opening is not None and earlier.sent_sha256 == sent.opening_sha256:
            before = earlier.prompt.length + len(earlier.sampled_ids)
            return Added(earlier.call_id, sent.after(sent.opening.end), self.ids[before:])
        if recorded is not None and sent.sha256 is not None and recorded.tools == sent.tools:
            kept = self.tokens.common(recorded.prompt)
            return Added(recorded.call_id, sent.after(recorded.end), self.ids[kept:], recorded.count, kept)
        return Added(None, sent.whole(), self.ids)
