"""The beginning of a body that an earlier call has brought already: its messages are not parsed again.

An SDK writes the same history with the same bytes. Where a body begins with bytes that were read before, up to the end
of a message, only the messages after them are read, together with the body's other fields. Nothing is guessed: the
array into which they continue is found again in the parsed body by a mark that stands in their place.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    import hashlib

    from services.gateway.request import Json, Turn

_MARK = secrets.token_hex(16)
_MARK_JSON = f'"{_MARK}"'.encode()
_skip_space = re.compile(r"[ \t\n\r]*").match
_decoder = json.JSONDecoder(strict=False)
# Numbers that Postgres would write out to thousands of digits, or refuse. What begins with one class of bytes, not with
# one of two things, is found five times as fast.
_VAST = re.compile(rb"[0-9](?:[0-9]{99}|[eE][+-]?[0-9]{2})")


@dataclass(frozen=True, slots=True)
class Opening:
    """A body's first bytes, up to the end of a message, and what reading them gave.

    Args: raw: the bytes; start: where the first message begins; turns: its messages; values: its objects, arrays and
        commas; sha256: of the bytes; is_plain: the bytes of the messages can be stored as they are
    """

    raw: bytes
    start: int
    turns: tuple[Turn, ...]
    values: int
    sha256: hashlib._Hash
    is_plain: bool


@dataclass(frozen=True, slots=True)
class Pieces:
    """A body taken apart.

    Args: document: the body with only the messages after the opening; ends: where each of them ends in the body;
        start, end: the array of all messages in the body, between its brackets
    """

    document: Json
    ends: list[int]
    start: int
    end: int


class NotCut(ValueError):
    """The body cannot be taken apart here: it is parsed as a whole, which also says what is wrong with it."""


def cut(body: bytes, opening: Opening | None) -> Pieces:
    """The body's fields, and the messages that follow what is known of it.

    Args: opening: the body begins with its bytes
    Raises: NotCut
    """
    known = 0 if opening is None else len(opening.raw)
    # One byte, one character: places are the same, and no byte of a longer character looks like JSON's signs.
    text = body[known:].decode("latin-1")
    try:
        first = _array_start(text) if opening is None else 0
        ends, after = _message_ends(text, first, is_first=opening is None)
        begin = first if opening is None else _expect(text, 0, ",")
        start = first if opening is None else opening.start
        document = orjson.loads(b"".join([body[:start], _MARK_JSON, body[known + after - 1 :]]))
        if document.get("messages") != [_MARK]:
            raise NotCut("another array counts")
        document["messages"] = orjson.loads(b"[" + body[known + begin : known + after])
    except (ValueError, IndexError, RecursionError, AttributeError) as error:
        raise NotCut(str(error)) from error
    return Pieces(document, [known + end for end in ends], start, known + after - 1)


def is_plain(raw: bytes) -> bool:
    """Whether a JSON text means the same to Postgres and can be stored as it is."""
    return rb"\u0000" not in raw and _VAST.search(raw) is None


def _array_start(text: str) -> int:
    """Where the first element of the body's messages begins."""
    position = _expect(text, 0, "{")
    while True:
        key, position = _decoder.raw_decode(text, position)
        position = _expect(text, position, ":")
        if key == "messages":
            return _expect(text, position, "[")
        _, position = _decoder.raw_decode(text, position)
        position = _expect(text, position, ",")


def _message_ends(text: str, position: int, *, is_first: bool) -> tuple[list[int], int]:
    """The ends of an array's elements, and the end of the array."""
    ends: list[int] = []
    while True:
        position = _space(text, position)
        if text[position] == "]":
            return ends, position + 1
        if not is_first:
            position = _expect(text, position, ",")
        is_first = False
        _, position = _decoder.raw_decode(text, position)
        ends.append(position)


def _expect(text: str, position: int, sign: str) -> int:
    """The place after a sign and the space around it."""
    position = _space(text, position)
    if text[position] != sign:
        raise NotCut(f"no {sign} at {position}")
    return _space(text, position + 1)


def _space(text: str, position: int) -> int:
    found: Any = _skip_space(text, position)
    return int(found.end())
