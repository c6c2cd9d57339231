"""Parts of calls that a trainer reads: those of a sample's row, from credit, and the experts that an engine chose."""

from __future__ import annotations

import struct
from dataclasses import dataclass

_HEADER = struct.Struct("<IIB")


@dataclass(slots=True)
class RowCall:
    """A call that a row trains: the credit worker writes it into `samples.calls`, and the trainer's critic reads it.

    begin, end: its first and last trained token in the row; parent: the trained call that it continues, by id; reward:
    what it earned before the calls that continue it; share: the weight of its return in that of its parent.
    """

    id: str
    parent: str | None
    reward: float
    share: float
    begin: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The experts of consecutive tokens, as stored beside a call.

    ids: unsigned integers [tokens, layers · experts of a token] of `item_bytes` bytes, 1 or 2, little-endian; the
    largest number of the type stands for an expert that the engine did not name. Layers without experts have zeros.

    start: position of the first token among the call's prompt and sampled tokens; width: layers · experts of a token.
    """

    start: int
    width: int
    item_bytes: int
    ids: bytes

    def stored(self) -> bytes:
        """The bytes of `model_calls.routed_experts`."""
        return _HEADER.pack(self.start, self.width, self.item_bytes) + self.ids

    @classmethod
    def parse(cls, stored: bytes) -> RoutedExperts:
        """Raises: ValueError: the bytes are damaged"""
        if len(stored) < _HEADER.size:
            raise ValueError("routed experts without a header")
        start, width, item_bytes = _HEADER.unpack_from(stored)
        found = cls(start, width, item_bytes, stored[_HEADER.size :])
        if found.item_bytes not in {1, 2} or not found.width or len(found.ids) % (found.width * found.item_bytes):
            raise ValueError(f"{len(found.ids)} bytes of routed experts, {found.width} of a token")
        return found
