"""Samples: one row per root-to-leaf path of the forest, each sampled token trained in exactly one of them.

Axes: T tokens of a path.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from leyden.libs.contracts.samples import RowCall
from leyden.services.credit.forest import Forest, Node, path_to
from leyden.services.credit.records import TOKEN


@dataclass(frozen=True, slots=True)
class Path:
    """A row for the loss, arrays [T].

    A token with mask 0 has log-probability and advantage 0, temperature 1 and version -1. `calls` are in order, with
    `row_calls`; else empty. `call_id` is the leaf. `policy` sampled and trains the row; None for the run's own model.
    """

    branch: int
    call_id: str
    token_ids: NDArray[np.int32]
    mask: NDArray[np.uint8]
    generator_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    temperatures: NDArray[np.float32]
    policy_versions: NDArray[np.int32]
    calls: list[RowCall] = field(default_factory=list)
    policy: str | None = None

    @property
    def trained_tokens(self) -> int:
        """The number of tokens that the row trains."""
        return int(self.mask.sum())

    @property
    def min_policy_version(self) -> int:
        """The oldest policy that sampled a trained token."""
        return int(self.policy_versions[self.mask == 1].min())


def row_calls(forest: Forest, rewards: Mapping[str, float]) -> dict[str, RowCall]:
    """The trained calls by id, without their places. rewards: by call id, with the outcome at leaves.

    The return of a call is its reward and Σ share · return of the calls that continue it: a mean at every fork, as in
    the rule `discounted`. A call that does not train has no state to value: its reward, times its share, counts at the
    trained call before it, and the calls after it continue that one.
    """
    found: dict[str, RowCall] = {}
    before: dict[int, tuple[str | None, float]] = {}
    for node in forest.nodes:
        call = node.call
        parent, share = (None, 1.0) if node.parent is None else before[id(node.parent)]
        if call.learnable:
            found[call.id] = RowCall(call.id, parent, rewards[call.id], share)
            parent, share = call.id, 1.0
        elif parent is not None:
            found[parent].reward += share * rewards[call.id]
        before[id(node)] = parent, share / max(1, len(node.children))
    return found


def paths(
    forest: Forest,
    advantages: Mapping[str, float | NDArray[np.float64]],
    calls: Mapping[str, RowCall] | None = None,
) -> list[Path]:
    """The rows of a rollout, in the order of their leaves.

    The first path with a call trains it. Aborted calls, and calls that no trainer can reproduce, stay in their rows as
    context. A path without a token to train makes no row.

    Args: advantages: by call id, of every learnable call: one number, or [S] for its trained tokens; calls:
        `row_calls`, whose places the rows determine
    """
    rows: list[Path] = []
    trained: set[str] = set()
    for leaf in forest.leaves:
        nodes = path_to(leaf)
        fresh = [node for node in nodes if node.call.learnable and node.call.id not in trained]
        if fresh:
            rows.append(_row(len(rows), leaf, fresh, advantages, calls or {}))
            trained.update(node.call.id for node in fresh)
    return rows


def _row(
    branch: int,
    leaf: Node,
    trained: list[Node],
    advantages: Mapping[str, float | NDArray[np.float64]],
    calls: Mapping[str, RowCall],
) -> Path:
    token_ids = np.frombuffer(leaf.call.prompt + leaf.call.sampled, TOKEN)
    length = len(token_ids)
    row = Path(
        branch=branch,
        call_id=leaf.call.id,
        token_ids=token_ids,
        mask=np.zeros(length, np.uint8),
        generator_logprobs=np.zeros(length, np.float32),
        advantages=np.zeros(length, np.float32),
        temperatures=np.ones(length, np.float32),
        policy_versions=np.full(length, -1, np.int32),
        policy=leaf.call.policy,
    )
    for node in trained:
        call = node.call
        # The prompt of a child begins with its parent's tokens, so a call has the same place in all its paths.
        start = len(call.prompt) // TOKEN.itemsize
        chosen = call.trained_places()
        place = start + chosen
        row.mask[place] = 1
        row.generator_logprobs[place] = call.logprob_array()[chosen]
        row.advantages[place] = advantages[call.id]
        row.temperatures[place] = call.temperature
        row.policy_versions[place] = call.version_array()[chosen]
        if call.id in calls:
            row.calls.append(replace(calls[call.id], begin=int(place[0]), end=int(place[-1])))
    return row
