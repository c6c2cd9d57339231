"""The prefix cache: keys and values of token prefixes, which outlive the sequences that computed them.

A radix tree over token ids points into a store of slots, one slot per token. Each namespace (the weights' epoch and the
request's salt) has a tree of its own, so that no request finds keys and values that other weights computed. Rows copy
from the tree, so any leaf may be evicted at any moment.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leyden.services.engine.config import ModelConfig
from leyden.services.engine.rows import TokenIds, common_length

Slots = npt.NDArray[np.int64]

# Eviction frees at least this share of the store at once, so that evictions are rare.
_EVICTED_SHARE = 1 / 16


@dataclass(eq=False)
class _Node:
    """A run of tokens below its parent; `slots` holds the position of each token's keys and values."""

    token_ids: TokenIds
    slots: Slots
    parent: _Node | None
    used: int
    children: dict[int, _Node] = field(default_factory=dict)


class PrefixCache:
    """Finds the longest stored prefix of a sequence, and stores prefixes within a budget of tokens.

    Not thread-safe: only the scheduler's thread uses it.
    """

    def __init__(self, config: ModelConfig, capacity: int) -> None:
        """Args:    capacity: maximum number of stored tokens; memory is allocated as the store fills"""
        self._store = torch.empty(capacity, config.layers, 2, config.kv_heads, config.head_dim)
        chosen = 0 if config.experts is None else config.experts.chosen
        self._experts = torch.empty(capacity, config.layers, chosen, dtype=torch.int32)
        self._free = list(range(capacity - 1, -1, -1))
        self._roots: dict[Hashable, _Node] = {}
        self._clock = itertools.count()

    @property
    def used_tokens(self) -> int:
        """Number of stored tokens."""
        return len(self._store) - len(self._free)

    def find(self, namespace: Hashable, token_ids: TokenIds) -> Slots:
        """Returns the slots of the longest stored prefix of `token_ids`, possibly none; marks it as recently used."""
        found = [slots for _, slots in self._walk(namespace, token_ids)]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def read(self, slots: Slots) -> Tensor:
        """Returns a copy of the keys and values [n, L, 2, K, D] of slots."""
        return self._store.index_select(0, torch.from_numpy(slots))

    def read_experts(self, slots: Slots) -> Tensor:
        """Returns the experts [n, L, chosen] of the tokens in slots; none of a dense model."""
        return self._experts.index_select(0, torch.from_numpy(slots))

    def claim(self, namespace: Hashable, token_ids: TokenIds) -> tuple[int, Slots]:
        """Adds a sequence to the tree; returns the number of tokens stored already, and slots to `write` for the rest.

        It returns fewer slots than missing tokens when prefixes of this sequence fill the store.
        """
        root = self._roots.setdefault(namespace, self._new_node(np.empty(0, np.int32), np.empty(0, np.int64), None))
        path = list(self._walk(namespace, token_ids))
        cached = sum(len(slots) for _, slots in path)
        node = path[-1][0] if path else root
        slots = self._allocate(len(token_ids) - cached, protected=node)
        if len(slots):
            fresh = token_ids[cached : cached + len(slots)].copy()
            node.children[int(fresh[0])] = self._new_node(fresh, slots, node)
        return cached, slots

    def write(self, slots: Slots, kv: Tensor) -> None:
        """Stores keys and values [n, L, 2, K, D] at the slots from `claim`; call it directly after `claim`."""
        self._store.index_copy_(0, torch.from_numpy(slots), kv)

    def write_experts(self, slots: Slots, experts: Tensor) -> None:
        """Stores the experts [n, L, chosen] at the same slots."""
        self._experts.index_copy_(0, torch.from_numpy(slots), experts)

    def flush(self) -> None:
        """Removes all prefixes."""
        self._roots = {}
        self._free = list(range(len(self._store) - 1, -1, -1))

    def _walk(self, namespace: Hashable, token_ids: TokenIds) -> Iterator[tuple[_Node, Slots]]:
        """Yields the nodes of the longest prefix of `token_ids`, from the root; splits the last where it diverges."""
        node, done = self._roots.get(namespace), 0
        while node is not None and done < len(token_ids):
            child = node.children.get(int(token_ids[done]))
            if child is None:
                return
            matched = common_length(child.token_ids, token_ids[done:])
            if matched < len(child.token_ids):
                child = self._split(child, matched)
            child.used = next(self._clock)
            yield child, child.slots
            node, done = child, done + matched

    def _split(self, node: _Node, length: int) -> _Node:
        """Splits a node and returns the new parent with the first `length` tokens."""
        assert node.parent is not None
        upper = self._new_node(node.token_ids[:length], node.slots[:length], node.parent)
        node.parent.children[int(upper.token_ids[0])] = upper
        node.token_ids, node.slots, node.parent = node.token_ids[length:], node.slots[length:], upper
        upper.children[int(node.token_ids[0])] = node
        return upper

    def _new_node(self, token_ids: TokenIds, slots: Slots, parent: _Node | None) -> _Node:
        return _Node(token_ids, slots, parent, next(self._clock))

    def _allocate(self, count: int, protected: _Node) -> Slots:
        if count > len(self._free):
            self._evict(max(count - len(self._free), int(len(self._store) * _EVICTED_SHARE)), protected)
        count = min(count, len(self._free))
        slots = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return np.array(slots, np.int64)

    def _evict(self, count: int, protected: _Node) -> None:
        """Frees at least `count` slots, least recently used leaves first, but never `protected` or its ancestors."""
        spared = set(map(id, _lineage(protected)))
        leaves = [(node.used, id(node), node) for node in self._nodes() if not node.children and id(node) not in spared]
        heapq.heapify(leaves)
        while count > 0 and leaves:
            _, _, leaf = heapq.heappop(leaves)
            parent = leaf.parent
            assert parent is not None
            self._free.extend(leaf.slots.tolist())
            count -= len(leaf.slots)
            del parent.children[int(leaf.token_ids[0])]
            if not parent.children and parent.parent is not None and id(parent) not in spared:
                heapq.heappush(leaves, (parent.used, id(parent), parent))
        self._roots = {name: root for name, root in self._roots.items() if root.children or id(root) in spared}

    def _nodes(self) -> Iterator[_Node]:
        """Yields every node except the roots."""
        pending = [child for root in self._roots.values() for child in root.children.values()]
        while pending:
            node = pending.pop()
            pending.extend(node.children.values())
            yield node


def _lineage(node: _Node | None) -> Iterator[_Node]:
    while node is not None:
        yield node
        node = node.parent
