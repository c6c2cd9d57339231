"""Token ids that grow at their end; whatever continues them shares their memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]

TOKEN_BYTES = 5
"""What a token takes, room for those to come included."""


@dataclass(slots=True, eq=False)
class _Buffer:
    ids: TokenIds
    used: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """The first `length` ids of a buffer, which never change. `added_bytes`: memory taken beyond those continued."""

    _buffer: _Buffer
    length: int
    added_bytes: int

    @classmethod
    def of(cls, ids: TokenIds) -> Self:
        """Tokens of their own."""
        return cls(_Buffer(np.array(ids, dtype=np.int32), len(ids)), len(ids), TOKEN_BYTES * len(ids))

    @property
    def ids(self) -> TokenIds:
        """[length], read-only."""
        view = self._buffer.ids[: self.length]
        view.flags.writeable = False
        return view

    def or_longer(self, ids: TokenIds) -> Self:
        """Tokens of these ids, in the same memory where they begin with the ones here."""
        if len(ids) >= self.length and np.array_equal(ids[: self.length], self.ids):
            return self.followed_by(ids[self.length :])
        return self.of(ids)

    def followed_by(self, *parts: TokenIds) -> Self:
        """These tokens and more: in the same memory, unless others follow them there already."""
        added = sum(len(part) for part in parts)
        buffer, length = self._buffer, self.length + added
        if added and buffer.used != self.length:
            buffer, added = _Buffer(self.ids, self.length), length
        if length > len(buffer.ids):
            # An eighth of room: a long session moves seldom, and the place that it leaves is let go.
            grown = np.empty(length + length // 8, dtype=np.int32)
            grown[: self.length] = buffer.ids[: self.length]
            buffer.ids = grown
        if added:
            np.concatenate(parts, out=buffer.ids[self.length : length])
            buffer.used = length
        return type(self)(buffer, length, TOKEN_BYTES * added)
