"""Credit rules: from the rewards of one rollout to one return per model call.

Axes: C calls of a rollout, in the forest's order. Inputs of every rule: `intermediate_C`, the rewards of each call
(AIR and rewards given to it); `outcome`, the reward of the rollout. The total return is outcome + Σ intermediate.
"""

from __future__ import annotations

from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from leyden.libs.contracts.config import CreditRule, DiscountedCredit, EqualSplitCredit, IdenticalCredit
from leyden.services.credit.forest import Forest, Node

Floats = NDArray[np.float64]


def call_returns(rule: CreditRule, forest: Forest, intermediate_C: Floats, outcome: float) -> Floats:
    """Returns: [C] the return of each call."""
    match rule:
        case IdenticalCredit():
            return identical(intermediate_C, outcome)
        case EqualSplitCredit():
            return equal_split(intermediate_C, outcome)
        case DiscountedCredit():
            return discounted(forest, intermediate_C, outcome, rule.gamma)
        case _:
            assert_never(rule)


def identical(intermediate_C: Floats, outcome: float) -> Floats:
    """Every call gets the total return: outcome 1, intermediate [0.3, 0.2] gives [1.5, 1.5].

    Source: Agent Lightning, arXiv 2508.03680, 3.4.1: the episode's return to every call.
    """
    return np.full(len(intermediate_C), outcome + intermediate_C.sum())


def equal_split(intermediate_C: Floats, outcome: float) -> Floats:
    """Every call gets an equal part of the total return: outcome 1, intermediate [0.3, 0.2] gives [0.75, 0.75]."""
    return identical(intermediate_C, outcome) / max(1, len(intermediate_C))


def discounted(forest: Forest, intermediate_C: Floats, outcome: float, gamma: float) -> Floats:
    """G_k = r_k + γ · mean of G over the calls that continue k; a leaf ends with the outcome.

    On a chain of two with γ = 0.5, intermediate [0.3, 0.2], outcome 1: G_2 = 0.2 + 1, G_1 = 0.3 + 0.5 · 1.2 = 0.9.
    Every leaf of the forest ends with the outcome, since the reward judges each of these ends. The tree, unlike the
    order of arrival, separates the returns of concurrent branches.
    """
    returns: dict[int, float] = {}

    def of(node: Node, reward: float) -> float:
        if not node.children:
            return reward + outcome
        return reward + gamma * sum(returns[id(child)] for child in node.children) / len(node.children)

    # Children follow their parents.
    for node, reward in zip(reversed(forest.nodes), reversed(intermediate_C.tolist()), strict=True):
        returns[id(node)] = of(node, reward)
    return np.array([returns[id(node)] for node in forest.nodes])
