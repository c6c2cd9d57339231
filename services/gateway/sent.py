"""What a body says, as the store takes it: whole, or what it adds to an earlier body."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson

from leyden.libs.store.binary import Piece
from leyden.libs.store.calls import JsonText, storable_json

if TYPE_CHECKING:
    import hashlib

    from leyden.services.gateway.opening import Opening, Pieces

# Numbers that Postgres would write out to thousands of digits, or refuse. What begins with one class of bytes, not with
# one of two things, is found five times as fast.
_VAST = re.compile(rb"[0-9](?:[0-9]{99}|[eE][+-]?[0-9]{2})")
_STRING_OR_VAST = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|(%b)' % _VAST.pattern, re.DOTALL)


@dataclass(frozen=True, slots=True)
class Sent:
    """A body's messages and tools as Postgres takes them.

    Args: messages: JSON text between the brackets of the array; tools: JSON text; sha256: of the body up to its last
        message, and the tools; opening: that later bodies may continue; opening_sha256: of the opening, and the tools.
        None where the body, or its opening, is not stored as it was sent.
    """

    messages: Piece
    tools: bytes
    sha256: bytes | None = None
    opening: Opening | None = None
    opening_sha256: bytes | None = None

    def whole(self) -> JsonText:
        """`{messages, tools}`."""
        return JsonText(b"".join((b'{"messages":[', self.messages, b'],"tools":', self.tools, b"}")))

    def after(self, end: int) -> JsonText:
        """`{messages}`, those after one that ends there, as `Opening.end`, of messages stored as they were sent."""
        _, _, added = bytes(self.messages[end:]).partition(b",")
        return JsonText(b"".join((b'{"messages":[', added, b"]}")))


def sent_of(body: bytes, pieces: Pieces, settled: Opening | None, tools: bytes, upto_messages: hashlib._Hash) -> Sent:
    """Messages and tools of a body for its record.

    Args: settled, upto_messages: as `settle` gives them; tools: as JSON text that Postgres takes
    """
    known = 0 if settled is None else len(settled.raw)
    messages = memoryview(body)[pieces.start : pieces.end]
    if not (is_plain(body[known : pieces.end]) and (settled is None or settled.is_plain)):
        return Sent(storable_json(orjson.loads(b"".join((b"[", messages, b"]"))))[1:-1], tools)
    digest = _digest_with(upto_messages, tools)
    if settled is None:
        return Sent(messages, tools, sha256=digest)
    return Sent(messages, tools, digest, settled, _digest_with(settled.sha256, tools))


def is_plain(raw: bytes) -> bool:
    """Whether a JSON text means the same to Postgres and can be stored as it is.

    Args: raw: begins and ends outside of its strings
    """
    if rb"\u0000" in raw:
        return False
    # Digits of ids in texts look like such numbers, too.
    return _VAST.search(raw) is None or not any(found[1] for found in _STRING_OR_VAST.finditer(raw))


def _digest_with(sha256: hashlib._Hash, more: bytes) -> bytes:
    longer = sha256.copy()
    longer.update(more)
    return longer.digest()
