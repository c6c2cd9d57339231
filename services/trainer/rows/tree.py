"""Rows with a common beginning share its computation: a batch becomes prefixes and packs of token trees behind them.

Axes: N rows, M nodes of a pack or prefix, K trained tokens of a pack's rows.

Rows are sorted by their tokens. A row then shares its longest common beginning with the row before it, new nodes are
in depth-first order, and the subtree of a node is a contiguous range: node i is an ancestor of node j exactly if
i <= j < end_i. Two vectors of length M describe the entire attention mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

# A forward and backward pass of its own costs about as much as this many tokens (SmolLM2-135M on one core).
LEAST_PREFIX = 64


@dataclass(frozen=True)
class Pack:
    """The trees of some rows, computed in one forward pass behind their prefixes.

    token_ids_M, depths_M: the token of each node and its position in its rows; origins_M: the number of the first
    of the rows that have it; ends_M: the end of its subtree; path: the prefixes before the pack, numbers within the
    forest, from the root; prefix_tokens: how many they have; rows: the numbers of the rows within the batch; nodes: for
    each of those rows, its nodes in order, so that position p >= prefix_tokens of row `rows[i]` is node
    `nodes[i][p - prefix_tokens]`; experts_M_S: for each node its recorded experts in all layers, or -1 where there
    is no record; None: the model chooses by itself.

    A prefix is a pack of one chain, without rows.
    """

    token_ids_M: Ints
    depths_M: Ints
    origins_M: Ints
    ends_M: Ints
    path: tuple[int, ...]
    prefix_tokens: int
    rows: list[int]
    nodes: list[Ints]
    experts_M_S: NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.token_ids_M)


@dataclass(frozen=True)
class Forest:
    """A batch ready to compute: packs that hold every row once, in depth-first order, and the prefixes before them."""

    prefixes: list[Pack]
    packs: list[Pack]

    @property
    def computed_tokens(self) -> int:
        """Tokens that pass through the model: every distinct node of every prefix and pack."""
        return sum(map(len, self.prefixes)) + sum(map(len, self.packs))


def plan_forest(token_ids: Sequence[NDArray[np.int32]], max_pack_tokens: int) -> Forest:
    """Shares the beginnings of rows, in packs of at most `max_pack_tokens` nodes (a longer row is a pack of its own).

    Rows that fit into one pack become one. Otherwise their common beginning becomes a prefix, unless it is shorter than
    LEAST_PREFIX, and the branches behind it are planned separately, as many to a pack as fit.

    Worked example: rows [1, 2, 3], [1, 2, 4, 5] make one pack of the nodes 1, 2, 3, 4, 5 with depths 0, 1, 2, 2, 3 and
    ends 5, 5, 3, 5, 5.

    Args: token_ids: N arrays of token ids, none of them empty
    """
    order = sorted(range(len(token_ids)), key=lambda row: sort_key(token_ids[row]))
    rows = _SortedRows([token_ids[row] for row in order])
    prefixes: list[Pack] = []
    packs: list[Pack] = []
    waiting: list[_Branch] = [_Branch(0, len(order), (), 0)] if order else []
    while waiting:
        branch = waiting.pop()
        if branch.end - branch.begin == 1 or rows.new(branch.begin, branch.end, branch.depth) <= max_pack_tokens:
            packs.append(rows.pack(branch, order))
            continue
        fork = min(rows.shared[branch.begin + 1 : branch.end])
        # Every row retains a node of its own, so that no pack is empty.
        common = min(fork, *(len(ids) - 1 for ids in rows.token_ids[branch.begin : branch.end]))
        path, depth = branch.path, branch.depth
        if common - depth >= LEAST_PREFIX:
            prefixes.append(_chain(rows.token_ids[branch.begin][depth:common], path, depth, order[branch.begin]))
            path, depth = (*path, len(prefixes) - 1), common
        pieces = [_Branch(*piece, path, depth) for piece in rows.pieces(branch, fork, depth, max_pack_tokens)]
        waiting.extend(reversed(pieces))
    return Forest(prefixes, packs)


def share_rows(token_ids: Sequence[NDArray[np.int32]], rank: int, ranks: int) -> list[int]:
    """The rows that one of `ranks` processes computes: a stretch of the sorted rows, about as many nodes as any other.

    Neighbours share their beginnings; where a stretch ends, both ranks compute the common one.
    """
    order = sorted(range(len(token_ids)), key=lambda row: sort_key(token_ids[row]))
    before = _SortedRows([token_ids[row] for row in order]).own_before
    # A row is in the share in which the middle of its own nodes lies.
    shares = [min((a + b) * ranks // (2 * before[-1]), ranks - 1) for a, b in pairwise(before)]
    return [row for row, share in zip(order, shares, strict=False) if share == rank]


@dataclass(frozen=True)
class _Branch:
    """Sorted rows begin:end, to be computed behind the `depth` tokens of the prefixes in `path`."""

    begin: int
    end: int
    path: tuple[int, ...]
    depth: int


class _SortedRows:
    """Rows in order. shared[i]: the number of tokens that row i has in common with row i - 1."""

    def __init__(self, token_ids: list[NDArray[np.int32]]) -> None:
        self.token_ids = token_ids
        self.shared = [0] + [common_length(a, b) for a, b in pairwise(token_ids)]
        own = (len(ids) - shared for ids, shared in zip(token_ids, self.shared, strict=False))
        self.own_before = list(accumulate(own, initial=0))

    def new(self, begin: int, end: int, depth: int) -> int:
        """The number of nodes of the rows begin:end beyond `depth`, up to which all of them are equal."""
        return len(self.token_ids[begin]) - depth + self.own_before[end] - self.own_before[begin + 1]

    def pieces(self, branch: _Branch, fork: int, depth: int, most: int) -> Iterator[tuple[int, int]]:
        """Ranges of the branches that part at `fork`; neighbours share a range while they fit into a pack."""
        begin = branch.begin
        parts = [row for row in range(begin + 1, branch.end) if self.shared[row] == fork]
        for part, next_part in pairwise([*parts, branch.end]):
            if self.new(begin, next_part, depth) > most:
                yield begin, part
                begin = part
        yield begin, branch.end

    def pack(self, branch: _Branch, order: Sequence[int]) -> Pack:
        """The pack of a branch. order: the number of each sorted row in the batch."""
        tokens: list[Ints] = []
        depths: list[Ints] = []
        origins: list[Ints] = []
        nodes: list[Ints] = []
        closed: list[tuple[Ints, int]] = []
        path = np.zeros(0, np.int64)
        count, prefix = 0, branch.depth
        for row in range(branch.begin, branch.end):
            shared = self.shared[row] - prefix if nodes else 0
            closed.append((path[shared:], count))
            new = self.token_ids[row][prefix + shared :]
            tokens.append(new.astype(np.int64))
            depths.append(np.arange(prefix + shared, prefix + shared + len(new)))
            origins.append(np.full(len(new), order[row]))
            path = np.concatenate([path[:shared], np.arange(count, count + len(new))])
            nodes.append(path)
            count += len(new)
        closed.append((path, count))

        ends_M = np.full(count, count, np.int64)
        for finished, end in closed:
            ends_M[finished] = end
        rows = list(order[branch.begin : branch.end])
        token_ids_M, depths_M, origins_M = (np.concatenate(column) for column in (tokens, depths, origins))
        return Pack(token_ids_M, depths_M, origins_M, ends_M, branch.path, prefix, rows, nodes)


def ancestor_mask(pack: Pack) -> NDArray[np.bool_]:
    """[M, M]: True where the column's node is the row's node or one of its ancestors."""
    node_M = np.arange(len(pack))
    mask: NDArray[np.bool_] = (node_M <= node_M[:, None]) & (node_M[:, None] < pack.ends_M)
    return mask


def _chain(token_ids: NDArray[np.int32], path: tuple[int, ...], depth: int, row: int) -> Pack:
    length = len(token_ids)
    depths_M = np.arange(depth, depth + length)
    ends_M = np.full(length, length)
    return Pack(token_ids.astype(np.int64), depths_M, np.full(length, row), ends_M, path, depth, [], [])


def common_length(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """The length of the longest common beginning of two rows."""
    length = min(len(a), len(b))
    different = a[:length] != b[:length]
    return int(different.argmax()) if different.any() else length


def sort_key(token_ids: NDArray[np.int32]) -> bytes:
    """The order of rows in which neighbours share the most."""
    # Big-endian bytes of non-negative integers compare as the integers do.
    return token_ids.astype(">u4").tobytes()
