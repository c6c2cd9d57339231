"""Keys and values of the sequences in flight, laid out so that attention reads them without gathering.

A sequence in flight has a row: its own tokens, contiguous per head, in a bucket of rows of equal width. Sequences with
a common prefix may share one copy of it, a `SharedPrefix`; their rows then begin after it. `cache.PrefixCache` stores
keys and values for later sequences.

Legend: L layers, R rows, K key-value heads, W width (tokens a row can hold), D head size, P tokens of a prefix.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leyden.services.engine.config import ModelConfig

TokenIds = npt.NDArray[np.int32]

_NARROWEST = 32
# An empty bucket with room for more tokens than this is freed.
_MAX_IDLE_TOKENS = 16384


@dataclass(eq=False)
class SharedPrefix:
    """A common prefix of several rows: its tokens, their keys and values [L, K, P, D], and the number of rows."""

    namespace: Hashable
    token_ids: TokenIds
    keys: Tensor
    values: Tensor
    users: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(eq=False)
class Row:
    """A sequence's keys and values: those of `prefix`, then those of `length` own tokens."""

    bucket: Bucket
    index: int
    prefix: SharedPrefix | None
    length: int = 0

    @property
    def start(self) -> int:
        """Position in the sequence of the row's first token."""
        return 0 if self.prefix is None else len(self.prefix)


@dataclass(eq=False)
class Bucket:
    """Rows of one width: keys and values [L, R, K, W, D], the first `len(rows)` of R in use, without holes."""

    width: int
    keys: Tensor
    values: Tensor
    rows: list[Row] = field(default_factory=list)

    def append(self, row: Row) -> None:
        if len(self.rows) == self.keys.shape[1]:
            self._resize(max(4, 2 * len(self.rows)))
        row.bucket, row.index = self, len(self.rows)
        self.rows.append(row)

    def remove(self, index: int) -> None:
        """Removes a row; the last row moves to its index, so that rows stay contiguous."""
        last = self.rows.pop()
        if index < len(self.rows):
            for tensor in (self.keys, self.values):
                tensor[:, index, :, : last.length] = tensor[:, last.index, :, : last.length]
            last.index = index
            self.rows[index] = last
        if not self.rows and self.keys.shape[1] * self.width > _MAX_IDLE_TOKENS:
            self._resize(0)

    def _resize(self, rows: int) -> None:
        used = len(self.rows)
        for name in ("keys", "values"):
            old = getattr(self, name)
            layers, _, heads, width, size = old.shape
            # Zeros: positions beyond a row's length are masked, which needs finite values.
            new = torch.zeros(layers, rows, heads, width, size)
            new[:, :used] = old[:, :used]
            setattr(self, name, new)


class Workspace:
    """All rows, in buckets whose widths are powers of two."""

    def __init__(self, config: ModelConfig) -> None:
        self._shape = (config.layers, config.kv_heads, config.head_dim)
        self._buckets: dict[int, Bucket] = {}

    def seat(self, prefix: SharedPrefix | None, width: int) -> Row:
        """Allocates an empty row for at least `width` tokens after `prefix`."""
        bucket = self._bucket(width)
        row = Row(bucket, 0, prefix)
        bucket.append(row)
        if prefix is not None:
            prefix.users += 1
        return row

    def reserve(self, row: Row, length: int) -> None:
        """Makes room for `length` own tokens; the row may move to a wider bucket."""
        if length <= row.bucket.width:
            return
        narrow, index = row.bucket, row.index
        wide = self._bucket(length)
        wide.append(row)
        for source, target in ((narrow.keys, wide.keys), (narrow.values, wide.values)):
            target[:, row.index, :, : row.length] = source[:, index, :, : row.length]
        narrow.remove(index)

    def release(self, row: Row) -> None:
        row.bucket.remove(row.index)
        if row.prefix is not None:
            row.prefix.users -= 1

    def write(self, row: Row, kv: Tensor) -> None:
        """Appends tokens [n, L, 2, K, D] to a row; call `reserve` first."""
        end = row.length + len(kv)
        place = slice(row.length, end)
        row.bucket.keys[:, row.index, :, place] = kv[:, :, 0].permute(1, 2, 0, 3)
        row.bucket.values[:, row.index, :, place] = kv[:, :, 1].permute(1, 2, 0, 3)
        row.length = end

    def read(self, row: Row, start: int, end: int) -> Tensor:
        """Returns keys and values [end - start, L, 2, K, D] of a sequence's positions, its prefix included."""
        parts = []
        if row.prefix is not None and start < row.start:
            shared = slice(start, min(end, row.start))
            parts.append((row.prefix.keys[:, :, shared], row.prefix.values[:, :, shared]))
        if end > row.start:
            own = slice(max(start - row.start, 0), end - row.start)
            parts.append((row.bucket.keys[:, row.index, :, own], row.bucket.values[:, row.index, :, own]))
        return torch.cat([torch.stack(part).permute(3, 1, 0, 2, 4) for part in parts])

    def share(self, namespace: Hashable, token_ids: TokenIds, kv: Tensor) -> SharedPrefix:
        """Creates a shared prefix with keys and values [P, L, 2, K, D]."""
        keys, values = (kv[:, :, side].permute(1, 2, 0, 3).contiguous() for side in (0, 1))
        return SharedPrefix(namespace, token_ids, keys, values)

    def _bucket(self, width: int) -> Bucket:
        rounded = max(_NARROWEST, 1 << (width - 1).bit_length())
        if rounded not in self._buckets:
            layers, heads, size = self._shape
            keys, values = (torch.zeros(layers, 0, heads, rounded, size) for _ in range(2))
            self._buckets[rounded] = Bucket(rounded, keys, values)
        return self._buckets[rounded]


def common_length(ids_a: TokenIds, ids_b: TokenIds) -> int:
    """Returns the length of the longest common prefix of two sequences."""
    size = min(len(ids_a), len(ids_b))
    differ = np.flatnonzero(ids_a[:size] != ids_b[:size])
    return int(differ[0]) if len(differ) else size


def common_length_of(many: Iterable[TokenIds]) -> int:
    """Returns the length of the longest common prefix of several sequences."""
    first, *rest = many
    return min((common_length(first, other) for other in rest), default=len(first))
