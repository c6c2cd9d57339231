"""The beginning of a body that an earlier call has brought already: its messages are not parsed again.

An SDK writes the same history with the same bytes. Where a body begins with bytes that were read before, up to the end
of a message, only the messages after them are read, together with the body's other fields. Nothing is guessed: the
array into which they continue is found again in the parsed body by a mark that stands in their place.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from leyden.services.gateway.sent import is_plain

if TYPE_CHECKING:
    from leyden.services.gateway.request import Json, Turn

_MARK = secrets.token_hex(16)
_MARK_JSON = f'"{_MARK}"'.encode()
_skip_space = re.compile(r"[ \t\n\r]*").match
_decoder = json.JSONDecoder(strict=False)


@dataclass(frozen=True, slots=True)
class Opening:
    """A body's first bytes, up to the end of a message, and what reading them gave.

    Two of the same bytes are equal: requests that overlap each read their own.

    Args: raw: the bytes; start: where the first message begins; turns: its messages; values: its objects, arrays and
        commas; sha256: of the bytes; is_plain: the bytes of the messages can be stored as they are
    """

    raw: bytes
    start: int = field(compare=False)
    turns: tuple[Turn, ...] = field(compare=False)
    values: int = field(compare=False)
    sha256: hashlib._Hash = field(compare=False)
    is_plain: bool = field(compare=False)

    @property
    def end(self) -> int:
        """Where its last message ends, counted from the first one's beginning."""
        return len(self.raw) - self.start


@dataclass(frozen=True, slots=True)
class Pieces:
    """A body taken apart.

    Args: document: the body with only the messages after the opening; ends: where each of them ends in the body;
        start, end: the array of all messages in the body, between its brackets; messages_end: where the last ends
    """

    document: Json
    ends: list[int]
    start: int
    end: int
    messages_end: int


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
    ends = [known + end for end in ends]
    return Pieces(document, ends, start, known + after - 1, ends[-1] if ends else known)


def settle(
    body: bytes, pieces: Pieces, opening: Opening | None, turns: tuple[Turn, ...]
) -> tuple[Opening | None, hashlib._Hash]:
    """The opening of this body that later ones may continue, and the digest of the body up to the last message's end.

    It ends before the last answer, or before the last message where there is none: then a body that is sent again, and
    one that goes on from the same answer in another way, continue it too. Results of one round are not divided: a body
    with one more than was known settles nothing.
    """
    first = 0 if opening is None else len(opening.turns)
    answers = (index for index in range(len(turns) - 1, first, -1) if turns[index].role == "assistant")
    count = next(answers, first if opening is not None else len(turns) - 1)
    while count > first and divides_results(turns, count):
        count -= 1
    sha256 = hashlib.sha256() if opening is None else opening.sha256.copy()
    known = 0 if opening is None else len(opening.raw)
    settled = None if divides_results(turns, count) else opening
    if count > first:
        end = pieces.ends[count - first - 1]
        sha256.update(body[known:end])
        values = count_values(body, known, end) + (0 if opening is None else opening.values)
        plain = (opening is None or opening.is_plain) and is_plain(body[known:end])
        settled = Opening(body[:end], pieces.start, turns[:count], values, sha256.copy(), plain)
        known = end
    sha256.update(body[known : pieces.messages_end])
    return settled, sha256


def divides_results(turns: Sequence[Turn], place: int) -> bool:
    """Whether turns before and after a place are tool results, which may be one message to the template."""
    return 0 < place < len(turns) and turns[place].role == turns[place - 1].role == "tool"


def count_values(body: bytes, start: int, end: int | None = None) -> int:
    """Objects, arrays and commas of a part of the body, and those signs within its texts."""
    return sum(body.count(sign, start, end) for sign in (b",", b"[", b"{"))


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
