"""Rows that begin alike share their computation: a batch becomes one common prefix and packs of token trees.

Axes: N rows, P tokens of the common prefix, M nodes of a pack, K trained tokens of a pack's rows.

Rows are sorted by their tokens. A row then shares its longest common beginning with the row before it, new nodes come
in depth-first order, and the subtree of a node is a contiguous range: node i is an ancestor of node j exactly if
i <= j < end_i. Two vectors of length M describe the whole attention mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Pack:
    """The trees of some rows, computed in one forward pass behind the common prefix.

    token_ids_M, depths_M: the token of each node and its position in its rows, prefix included; ends_M: the end of its
    subtree; rows: whose nodes these are; nodes: for each of those rows, its nodes in order, so that position
    p >= prefix of row `rows[i]` is node `nodes[i][p - prefix]`.
    """

    token_ids_M: Ints
    depths_M: Ints
    ends_M: Ints
    rows: list[int]
    nodes: list[Ints]

    def __len__(self) -> int:
        return len(self.token_ids_M)


@dataclass(frozen=True)
class Forest:
    """A batch ready to compute: prefix_P token ids that every row begins with, and packs that hold every row once."""

    prefix_P: Ints
    packs: list[Pack]

    @property
    def computed_tokens(self) -> int:
        """Tokens that pass through the model: the prefix once, and every distinct node of every pack."""
        return len(self.prefix_P) + sum(map(len, self.packs))


def plan_forest(token_ids: Sequence[NDArray[np.int32]], first_trained: Sequence[int], max_pack_tokens: int) -> Forest:
    """Shares the beginnings of rows, in packs of at most `max_pack_tokens` nodes (a longer row is a pack of its own).

    The common prefix ends before the parent of the first trained token: every hidden state that the loss reads is in a
    pack, and of the prefix only keys and values are needed.

    Worked example: rows [1, 2, 3], [1, 2, 4, 5], trained from position 2, make the prefix [1] and one pack of the nodes
    2, 3, 4, 5 with depths 1, 2, 2, 3 and ends 4, 2, 4, 4.

    Args: token_ids: N arrays of token ids; first_trained: N positions of each row's first trained token, >= 1.
    """
    order = sorted(range(len(token_ids)), key=lambda row: _sort_key(token_ids[row]))
    if not order:
        return Forest(np.zeros(0, np.int64), [])
    prefix = min(_common(token_ids[order[0]], token_ids[order[-1]]), min(first_trained) - 1)
    shared = [prefix] + [max(prefix, _common(token_ids[a], token_ids[b])) for a, b in pairwise(order)]

    packs: list[Pack] = []
    begin = size = 0
    for i, row in enumerate(order):
        new = len(token_ids[row]) - (shared[i] if i > begin else prefix)
        if i > begin and size + new > max_pack_tokens:
            packs.append(_grow(token_ids, order[begin:i], shared[begin:i], prefix))
            begin, size, new = i, 0, len(token_ids[row]) - prefix
        size += new
    packs.append(_grow(token_ids, order[begin:], shared[begin:], prefix))
    return Forest(token_ids[order[0]][:prefix].astype(np.int64), packs)


def ancestor_mask(pack: Pack) -> NDArray[np.bool_]:
    """[M, M]: True where the column's node is the row's node or one of its ancestors."""
    node_M = np.arange(len(pack))
    mask: NDArray[np.bool_] = (node_M <= node_M[:, None]) & (node_M[:, None] < pack.ends_M)
    return mask


def _grow(token_ids: Sequence[NDArray[np.int32]], rows: list[int], shared: list[int], prefix: int) -> Pack:
    """One pack of sorted rows; shared[i] is how much row i has in common with row i - 1."""
    tokens: list[Ints] = []
    depths: list[Ints] = []
    nodes: list[Ints] = []
    closed: list[tuple[Ints, int]] = []
    path = np.zeros(0, np.int64)
    count = 0
    for i, row in enumerate(rows):
        keep = shared[i] - prefix if i else 0
        closed.append((path[keep:], count))
        new = token_ids[row][prefix + keep :]
        tokens.append(new.astype(np.int64))
        depths.append(np.arange(prefix + keep, prefix + keep + len(new)))
        path = np.concatenate([path[:keep], np.arange(count, count + len(new))])
        nodes.append(path)
        count += len(new)
    closed.append((path, count))

    ends_M = np.full(count, count, np.int64)
    for finished, end in closed:
        ends_M[finished] = end
    return Pack(np.concatenate(tokens), np.concatenate(depths), ends_M, rows, nodes)


def _common(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """How many tokens two rows have in common from their start."""
    length = min(len(a), len(b))
    different = a[:length] != b[:length]
    return int(different.argmax()) if different.any() else length


def _sort_key(token_ids: NDArray[np.int32]) -> bytes:
    # Big-endian bytes of non-negative integers compare as the integers do.
    return token_ids.astype(">u4").tobytes()
