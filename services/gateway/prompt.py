"""A prompt ready for the engine, and a completed call as later prompts continue it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from leyden.services.gateway.sent import Sent
from leyden.services.gateway.tokens import TokenIds, Tokens

MOST_READ = 4
"""To make a call whole, rows are read that hold at most so many times what it does: a large last message that no later
request has lies in the chain of each. A row that would be more is stored whole, which adds a third to what a session
stores at most: the rows between two such hold three times what the later one does."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A completed call as later prompts need it: its exact tokens, and length and digest of its prompt's text.

    `sent_sha256`: of what it was sent, as `Sent.sha256`; None where that is not known; `chain_bytes`: what its row and
    those before it in its chain hold, where that is known
    """

    call_id: str
    prompt: Tokens
    sampled_ids: TokenIds
    prompt_characters: int
    prompt_digest: bytes
    sent_sha256: bytes | None
    chain_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Recorded:
    """A call with a durable row, whose messages begin as those of other calls do.

    Args: prompt: its tokens; tools: as `Sent.tools`; count, end: of the messages that both have, stored as they were
        sent, `end` as in `Opening`; chain_bytes: as in `Answered`
    """

    call_id: str
    prompt: Tokens
    tools: bytes
    count: int
    end: int
    chain_bytes: int


class Added(NamedTuple):
    """What a row holds of a call that was sent this: messages and prompt tokens after what it keeps of the call that it
    continues.

    `shared_turns`, `shared_tokens`: how many are kept; what continues no call holds all. `chain_bytes`: of this row and
    those before it in its chain
    """

    sent: Sent
    chain_bytes: int
    continues: str | None
    ids: TokenIds
    shared_turns: int = 0
    shared_tokens: int = 0


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
            messages, ids = sent.after(sent.opening.end), self.ids[before:]
            chain_bytes = earlier.chain_bytes + len(messages) + ids.nbytes
            return Added(sent, chain_bytes, earlier.call_id, ids, len(sent.opening.turns), before)
        ids, whole_bytes = self.ids, len(sent.messages) + len(sent.tools) + self.ids.nbytes
        if recorded is not None and sent.sha256 is not None and recorded.tools == sent.tools:
            kept = self.tokens.common(recorded.prompt)
            chain_bytes = recorded.chain_bytes + len(sent.messages) - recorded.end + ids[kept:].nbytes
            if chain_bytes <= MOST_READ * whole_bytes:
                return Added(sent, chain_bytes, recorded.call_id, ids[kept:], recorded.count, kept)
        return Added(sent, whole_bytes, None, ids)
