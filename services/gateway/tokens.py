"""Token ids that grow at their end; whatever continues them shares their memory.

Engines take ids as JSON, and writing fifty thousand numbers takes longer than most that a call does: the text of those
that an earlier call had is kept beside them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self, TypeVar

import numpy as np
import numpy.typing as npt
import orjson

TokenIds = npt.NDArray[np.int32]
Scalar = TypeVar("Scalar", bound=np.generic)

TOKEN_BYTES = 12
"""What a token takes as a number and as text, room for those to come included."""


_NO_IDS: TokenIds = np.empty(0, dtype=np.int32)


@dataclass(slots=True, eq=False)
class _Buffer:
    ids: TokenIds
    text: npt.NDArray[np.uint8]
    used: int


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The first ids of a buffer, which never change, and some at their end that lie apart.

    `added_bytes`: memory taken beyond those continued; `least`, `greatest`: no id is below or above
    """

    _buffer: _Buffer
    _used: int
    _text_length: int
    added_bytes: int
    least: int
    greatest: int
    _end: TokenIds

    @classmethod
    def of(cls, ids: TokenIds) -> Self:
        """Tokens of their own."""
        empty = _Buffer(_NO_IDS, np.empty(0, dtype=np.uint8), 0)
        return cls(empty, 0, 0, 0, 0, 0, _NO_IDS).followed_by(ids)

    @property
    def length(self) -> int:
        """How many."""
        return self._used + len(self._end)

    @property
    def end_bytes(self) -> int:
        """Memory of what lies apart."""
        return TOKEN_BYTES * len(self._end)

    @property
    def ids(self) -> TokenIds:
        """[length], read-only."""
        ids = self._buffer.ids[: self._used]
        if len(self._end):
            ids = np.concatenate([ids, self._end])
        ids.flags.writeable = False
        return ids

    @property
    def json(self) -> memoryview:
        """The ids as a JSON array has them, without its brackets."""
        text = self._buffer.text[: self._text_length].data
        if not len(self._end):
            return text
        return memoryview(b"".join([text, b"," if self._used else b"", json_of(self._end)]))

    def apart(self) -> Self:
        """The same tokens, which others follow in memory of their own."""
        buffer = self._buffer
        alone = _Buffer(buffer.ids[: self._used], buffer.text[: self._text_length], self._used)
        return replace(self, _buffer=alone)

    def shares(self, other: Tokens) -> bool:
        """Whether they lie in the same memory."""
        return self._buffer is other._buffer

    def common(self, other: Tokens) -> int:
        """How many ids both begin with."""
        length = min(self.length, other.length)
        differs = self.ids[:length] != other.ids[:length]
        return int(differs.argmax()) if differs.any() else length

    def or_longer(self, ids: TokenIds) -> Self:
        """Tokens of these ids, in the same memory where they begin with the ones here."""
        if len(ids) >= self.length and np.array_equal(ids[: self.length], self.ids):
            return self.followed_by(ids[self.length :])
        return self.of(ids)

    def ended_by(self, *parts: TokenIds) -> Self:
        """These tokens and more, whose memory is their own: what follows these here takes the place after them."""
        end = np.concatenate([self._end, *parts], dtype=np.int32)
        if not len(end):
            return replace(self, added_bytes=0)
        least, greatest = min(self.least, int(end.min())), max(self.greatest, int(end.max()))
        return replace(self, added_bytes=TOKEN_BYTES * len(end), least=least, greatest=greatest, _end=end)

    def followed_by(self, *parts: TokenIds) -> Self:
        """These tokens and more: in the same memory, unless others follow them there already."""
        more = np.concatenate([self._end, *parts], dtype=np.int32)
        added = len(more)
        if not added:
            return replace(self, added_bytes=0)
        buffer, used, length = self._buffer, self._used, self._used + added
        if buffer.used != used:
            buffer, added = _Buffer(buffer.ids[:used], buffer.text[: self._text_length], used), length
        text = json_of(more) if not used else b"," + json_of(more)
        text_length = self._text_length + len(text)
        buffer.ids = _with_room(buffer.ids, used, length)
        buffer.text = _with_room(buffer.text, self._text_length, text_length)
        buffer.ids[used:length] = more
        buffer.text[self._text_length : text_length] = np.frombuffer(text, dtype=np.uint8)
        buffer.used = length
        least, greatest = min(self.least, int(more.min())), max(self.greatest, int(more.max()))
        return type(self)(buffer, length, text_length, TOKEN_BYTES * added, least, greatest, _NO_IDS)


def json_of(ids: TokenIds) -> bytes:
    """The ids as a JSON array has them, without its brackets."""
    return orjson.dumps(ids, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]


def _with_room(kept: npt.NDArray[Scalar], used: int, length: int) -> npt.NDArray[Scalar]:
    """The same array where it is long enough, or a longer one that begins with what is used of it."""
    if length <= len(kept):
        return kept
    # An eighth of room: a long session moves seldom, and the place that it leaves is let go.
    grown = np.empty(length + length // 8, dtype=kept.dtype)
    grown[:used] = kept[:used]
    return grown
