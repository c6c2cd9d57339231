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


@dataclass(slots=True, eq=False)
class _Buffer:
    ids: TokenIds
    text: npt.NDArray[np.uint8]
    used: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """The first `length` ids of a buffer, which never change.

    `added_bytes`: memory taken beyond those continued; `least`, `greatest`: no id is below or above
    """

    _buffer: _Buffer
    length: int
    _text_length: int
    added_bytes: int
    least: int
    greatest: int

    @classmethod
    def of(cls, ids: TokenIds) -> Self:
        """Tokens of their own."""
        empty = _Buffer(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.uint8), 0)
        return cls(empty, 0, 0, 0, 0, 0).followed_by(ids)

    @property
    def ids(self) -> TokenIds:
        """[length], read-only."""
        view = self._buffer.ids[: self.length]
        view.flags.writeable = False
        return view

    @property
    def json(self) -> memoryview:
        """The ids as a JSON array has them, without its brackets."""
        return self._buffer.text[: self._text_length].data

    def apart(self) -> Self:
        """The same tokens, which others follow in memory of their own."""
        buffer = self._buffer
        alone = _Buffer(buffer.ids[: self.length], buffer.text[: self._text_length], self.length)
        return replace(self, _buffer=alone)

    def shares(self, other: Tokens) -> bool:
        """Whether they lie in the same memory."""
        return self._buffer is other._buffer

    def or_longer(self, ids: TokenIds) -> Self:
        """Tokens of these ids, in the same memory where they begin with the ones here."""
        if len(ids) >= self.length and np.array_equal(ids[: self.length], self.ids):
            return self.followed_by(ids[self.length :])
        return self.of(ids)

    def followed_by(self, *parts: TokenIds) -> Self:
        """These tokens and more: in the same memory, unless others follow them there already."""
        more = np.concatenate(parts, dtype=np.int32)
        added = len(more)
        if not added:
            return replace(self, added_bytes=0)
        buffer, length = self._buffer, self.length + added
        if buffer.used != self.length:
            buffer, added = _Buffer(buffer.ids[: self.length], buffer.text[: self._text_length], self.length), length
        text = json_of(more) if not self.length else b"," + json_of(more)
        text_length = self._text_length + len(text)
        buffer.ids = _with_room(buffer.ids, self.length, length)
        buffer.text = _with_room(buffer.text, self._text_length, text_length)
        buffer.ids[self.length : length] = more
        buffer.text[self._text_length : text_length] = np.frombuffer(text, dtype=np.uint8)
        buffer.used = length
        least, greatest = min(self.least, int(more.min())), max(self.greatest, int(more.max()))
        return type(self)(buffer, length, text_length, TOKEN_BYTES * added, least, greatest)


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
