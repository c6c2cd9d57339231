"""The passes of a forest in order, and one order for ranks whose forests differ.

Each pass over a model that is divided by layer gathers every layer from all ranks, so all ranks make the same passes:
where one has a prefix or a pack and another has none, that one passes a single token, which counts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Literal, NamedTuple

import numpy as np

from leyden.services.trainer.rows.tree import Forest, plan_forest

Shape = list["Shape | None"]
"""Passes without their numbers: None for a pack, a list for a prefix with what comes behind it."""
ONE_TOKEN = plan_forest([np.zeros(1, np.int32)], 1).packs[0]
"""A rank computes it where it has nothing."""


class Node(NamedTuple):
    """A prefix or, without `behind`, a pack, by its number within the forest."""

    number: int
    behind: list[Node] | None = None

    @property
    def shape(self) -> Shape | None:
        """The node without its number."""
        return None if self.behind is None else [node.shape for node in self.behind]

    @property
    def packs(self) -> int:
        """The number of packs below the node, itself included."""
        return 1 if self.behind is None else sum(node.packs for node in self.behind)


class Pass(NamedTuple):
    """`open` runs a prefix forward, and `close` the same one backward; number: None for a single token."""

    kind: Literal["open", "pack", "close"]
    number: int | None


def nodes_of(forest: Forest) -> list[Node]:
    """The forest as nodes. Prefixes come before packs and large ones before small ones, where ranks are most alike."""
    top: list[Node] = []
    behind: dict[tuple[int, ...], list[Node]] = {(): top}
    for number, pack in enumerate(forest.packs):
        for depth, prefix in enumerate(pack.path):
            before = pack.path[:depth]
            if (*before, prefix) not in behind:
                behind[*before, prefix] = []
                behind[before].append(Node(prefix, behind[*before, prefix]))
        behind[pack.path].append(Node(number))
    for nodes in behind.values():
        nodes.sort(key=lambda node: (node.behind is None, -node.packs))
    return top


def merged(shapes: Sequence[Shape]) -> Shape:
    """The least shape into which each of `shapes` fits, node by node.

    >>> merged([[[None, None], None], [None, None, None]])
    [[None, None], None, None]
    """
    found: Shape = []
    for column in zip_longest(*shapes, fillvalue=()):
        # A pack fits behind a prefix of one token.
        behind: list[Shape] = [[None] if one is None else list(one) for one in column if one != ()]
        found.append(None if all(one is None for one in column if one != ()) else merged(behind))
    return found


def passes(nodes: Sequence[Node], shape: Shape) -> Iterator[Pass]:
    """The passes of a rank with these nodes, as many and in the same order as of every other one in `shape`."""
    for node, behind in zip_longest(nodes, shape):
        if behind is None:
            yield Pass("pack", None if node is None else node.number)
        elif node is None or node.behind is None:
            yield Pass("open", None)
            yield from passes([] if node is None else [node], behind)
            yield Pass("close", None)
        else:
            yield Pass("open", node.number)
            yield from passes(node.behind, behind)
            yield Pass("close", node.number)
