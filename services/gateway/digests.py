"""Digests of conversations: the same for two spellings of the same turns, and one for each beginning."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import orjson

from leyden.services.gateway.request import Turn, parsed_arguments
from leyden.services.gateway.written import Conversation


def digest_chain(conversation: Conversation) -> list[bytes]:
    """One digest per prefix of the conversation, from no turn to all: [turns + 1].

    Spellings that agents change when they echo an answer do not count: ids and white space of tool arguments, the
    assistant's name, white space around its text.
    """
    return chain_from([base_digest(conversation)], conversation.turns)


def base_digest(conversation: Conversation) -> bytes:
    """Of a conversation without turns: its tools and options."""
    return _digest(orjson.dumps([conversation.tools, conversation.options], option=orjson.OPT_SORT_KEYS))


def chain_from(known: list[bytes], turns: Sequence[Turn]) -> list[bytes]:
    """The chain that begins with known digests."""
    chain = [*known]
    for turn in turns[len(known) - 1 :]:
        chain.append(extended(chain[-1], turn))
    return chain


def extended(digest: bytes, turn: Turn) -> bytes:
    """The digest of a conversation, given that of all but its last turn."""
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


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
