"""Chooses the prefixes that running sequences share.

Attention reads a shared prefix once per layer and step for all its rows, but needs an extra product for it: short
prefixes are not worth sharing.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

from leyden.services.engine.rows import SharedPrefix, TokenIds, common_length, common_length_of
from leyden.services.engine.sequence import Namespace

SHORTEST = 64
# Rows leave a prefix for a longer one, shared by fewer rows, only if it has at least this many more tokens.
LEAST_GAIN = 256


def choose_lengths(newcomers: Many[tuple[TokenIds, int]], peers: Many[TokenIds]) -> list[int]:
    """Returns the length of the prefix that each newcomer should share; 0 for none.

    Args:    newcomers: token ids, and the length of their cached prefix, which limits the shared one
             peers: token ids of sequences that run already, in the same namespace
    """
    lengths = [0] * len(newcomers)
    _deepen(lengths, newcomers, list(range(len(newcomers))), peers, 0, SHORTEST)
    return lengths


def _deepen(
    lengths: list[int],
    newcomers: Many[tuple[TokenIds, int]],
    members: Many[int],
    peers: Many[TokenIds],
    shared: int,
    gain: int,
) -> None:
    """Groups members that share `shared` tokens by their next `gain` tokens, then recurses into each group."""
    reach = shared + gain
    parts: dict[bytes, list[int]] = {}
    for index in members:
        token_ids, cached = newcomers[index]
        if cached >= reach:
            parts.setdefault(token_ids[:reach].tobytes(), []).append(index)
    for key, part in parts.items():
        near = [ids for ids in peers if len(ids) > reach and ids[:reach].tobytes() == key]
        if len(part) + len(near) < 2:
            continue
        common = min(common_length_of([*(newcomers[i][0] for i in part), *near]), *(newcomers[i][1] for i in part))
        for index in part:
            lengths[index] = common
        _deepen(lengths, newcomers, part, near, common, LEAST_GAIN)


def longest_match(prefixes: Many[SharedPrefix], namespace: Namespace, token_ids: TokenIds) -> SharedPrefix | None:
    """Returns the longest shared prefix in use that is a prefix of `token_ids`, all of which are cached."""
    matching = [
        prefix
        for prefix in prefixes
        if prefix.namespace == namespace
        and len(prefix) <= len(token_ids)
        and common_length(prefix.token_ids, token_ids) == len(prefix)
    ]
    return max(matching, key=len, default=None)
