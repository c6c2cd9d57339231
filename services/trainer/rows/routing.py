"""Recorded experts: of a sample from the records of its calls, and of a forest's nodes from those of its rows.

Axes: T tokens of a row, S experts of a token in all layers, M nodes of a pack or prefix, N rows of a forest.

The experts of a token depend on the tokens before it alone, as its keys and values do, so rows that share a token share
them, too. Engines round: two calls may have been given other experts for one token. The first call of a rollout that
has a record of the token decides, and among the rows of a step the first one in the order of their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from leyden.libs.store.records.chains import RoutedCall
from leyden.services.trainer.rows.tree import Forest, Pack, common_length, sort_key

UNRECORDED = -1
Experts = NDArray[np.uint8] | NDArray[np.uint16]
"""[T, S]; the largest number of the type where none is recorded, and S is 0 where no call of the row has a record."""


def row_experts(chain: Sequence[RoutedCall], tokens: int) -> Experts:
    """The recorded experts of a row. Args: chain: its calls, the oldest first; tokens: T

    Raises: ValueError: its calls have records of different models
    """
    recorded = [call.experts for call in chain if call.experts is not None]
    widths = {one.width for one in recorded}
    if len(widths) > 1:
        raise ValueError(f"calls of one rollout have routed experts of different models: {sorted(widths)} of a token")
    kind = np.dtype("u1" if all(one.item_bytes == 1 for one in recorded) else "u2")
    found = np.full((tokens, max(widths, default=0)), np.iinfo(kind).max, kind)
    for shared_tokens, experts in chain:
        # From there on the call has other tokens than its parent.
        found[shared_tokens:] = np.iinfo(kind).max
        if experts is None:
            continue
        own = np.frombuffer(experts.ids, f"<u{experts.item_bytes}").reshape(-1, experts.width)[: tokens - experts.start]
        place = found[experts.start : experts.start + len(own)]
        lacking = ~is_recorded(place)
        place[lacking] = _of_kind(own, kind)[lacking]
    return found


def agreed_experts(token_ids: Sequence[NDArray[np.int32]], experts: Sequence[Experts]) -> list[Experts]:
    """The experts of rows, one record for a token that several rows share, whichever packs and ranks compute them.

    It is that of the first row, in the order of trees, which has one.
    """
    kind = np.dtype("u1" if all(one.dtype.itemsize == 1 for one in experts) else "u2")
    width = max((one.shape[1] for one in experts), default=0)
    none = [np.full((len(one), width), np.iinfo(kind).max, kind) for one in experts]
    found = [_of_kind(one, kind) if one.shape[1] else empty for one, empty in zip(experts, none, strict=True)]
    order = sorted(range(len(found)), key=lambda row: sort_key(token_ids[row]))
    neighbours = [(one, other, common_length(token_ids[one], token_ids[other])) for one, other in pairwise(order)]
    for before, row, shared in neighbours:
        _fill(found[row][:shared], found[before][:shared])
    for before, row, shared in reversed(neighbours):
        _fill(found[before][:shared], found[row][:shared])
    return found


def _fill(experts: Experts, others: Experts) -> None:
    """Replaces, in place, the records of tokens for which the others have one."""
    complete = is_recorded(others)
    experts[complete] = others[complete]


def is_recorded(experts: Experts) -> NDArray[np.bool_]:
    """Whether each token has a complete record, [T]."""
    if not experts.shape[1]:
        return np.zeros(len(experts), bool)
    complete: NDArray[np.bool_] = (experts != np.iinfo(experts.dtype).max).all(axis=1)
    return complete


def with_experts(forest: Forest, experts_N: Sequence[Experts | None]) -> Forest:
    """The forest with the experts of its nodes; as it is where no row has any."""
    width = max((one.shape[1] for one in experts_N if one is not None), default=0)
    if not width:
        return forest

    def routed(pack: Pack) -> Pack:
        experts_M_S = np.full((len(pack), width), UNRECORDED, np.int32)
        for row in np.unique(pack.origins_M).tolist():
            own = experts_N[row]
            if own is None or not own.shape[1]:
                continue
            nodes = np.flatnonzero(pack.origins_M == row)
            recorded = own[pack.depths_M[nodes]]
            complete = is_recorded(recorded)
            experts_M_S[nodes[complete]] = recorded[complete]
        return replace(pack, experts_M_S=experts_M_S)

    return Forest([routed(one) for one in forest.prefixes], [routed(one) for one in forest.packs])


def _of_kind(own: Experts, kind: np.dtype[np.unsignedinteger]) -> Experts:
    wide: Experts = own.astype(kind)
    wide[own == np.iinfo(own.dtype).max] = np.iinfo(kind).max
    return wide
