"""The choice of prefixes that stand once for many rows.

A prefix that stands once is read once per layer and step, whatever the number of rows below it. It must be long enough
to be worth an attention of its own.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

from leyden.services.engine.rows import SharedPrefix, TokenIds, common_length, common_length_of
from leyden.services.engine.sequence import Namespace

SHORTEST = 64
# A longer prefix for some of the rows must add this much over the one they share with more.
LEAST_GAIN = 256


def choose_lengths(newcomers: Many[tuple[TokenIds, int]], peers: Many[TokenIds]) -> list[int]:
    """How many first tokens each newcomer should share with others; 0 for none.

    Args:    newcomers: token ids, and how many of the first are cached: no more can be shared
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
    """Splits members that share `shared` tokens by their next `gain` tokens, and goes on in each part."""
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
    """The longest prefix in use that `token_ids`, all of them cached, begin with."""
    matching = [
        prefix
        for prefix in prefixes
        if prefix.namespace == namespace
        and len(prefix) <= len(token_ids)
        and common_length(prefix.token_ids, token_ids) == len(prefix)
    ]
    return max(matching, key=len, default=None)
