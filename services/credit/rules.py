"""Credit rules: from the rewards of one rollout to one return per model call.

Axes: C calls of a rollout, in the forest's order. Inputs of every rule: `intermediate_C`, the rewards of each call
(AIR and rewards given to it); `outcome`, the reward of the rollout. The total return is outcome + Σ intermediate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from leyden.libs.contracts.config import (
    CreditRule,
    DiscountedCredit,
    EqualSplitCredit,
    IdenticalCredit,
    OwnCredit,
    TemporalCredit,
    TemporalDiscountCredit,
    TokenDiscountedCredit,
)
from leyden.services.credit.forest import Forest, Node

Floats = NDArray[np.float64]


def call_returns(
    rule: CreditRule, forest: Forest, intermediate_C: Floats, outcome: float, own_C: Floats | None = None
) -> Floats:
    """Returns: [C] the return of each call.

    Args: own_C: the outcome for each call, for rule `own`; None for the same outcome
    """
    match rule:
        case IdenticalCredit():
            return identical(intermediate_C, outcome)
        case EqualSplitCredit():
            return equal_split(intermediate_C, outcome)
        case DiscountedCredit():
            return discounted(forest, intermediate_C, outcome, rule.gamma)
        case TemporalCredit():
            return temporal(intermediate_C, outcome, rule.gamma)
        case TokenDiscountedCredit():
            return token_discounted(forest, intermediate_C, outcome, rule.gamma)
        case TemporalDiscountCredit():
            return temporal_discount(intermediate_C, outcome, rule)
        case OwnCredit():
            return intermediate_C + (outcome if own_C is None else own_C)
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
    return _along_the_tree(forest, intermediate_C, outcome, lambda node: gamma)


def temporal(intermediate_C: Floats, outcome: float, gamma: float) -> Floats:
    """G_k = r_k + γ · G_{k+1} over the calls in order of arrival; the last one ends with the outcome.

    Source: `turn_discount` of AReaL, which walks a session's calls in the reverse order of their creation.
    """
    returns_C = intermediate_C.astype(np.float64)
    returns_C[-1:] += outcome
    for number in range(len(returns_C) - 2, -1, -1):
        returns_C[number] += gamma * returns_C[number + 1]
    return returns_C


def temporal_discount(intermediate_C: Floats, outcome: float, rule: TemporalDiscountCredit) -> Floats:
    """a_t = R · γ^(N - t) / N over the calls in order of arrival, R the total return.

    With R = 1, γ = 0.9 and four calls: 0.164025, 0.18225, 0.2025, 0.225. `minus: future_average` subtracts
    b_t = Σ_{k ≥ t} r_k / (N - t), the last call's reward being the outcome: with r = (0, 0, 0, 1) that leaves
    -0.085975, -0.151083, -0.2975, -0.775.
    """
    count = len(intermediate_C)
    left_C = np.arange(count, 0, -1)
    rewards_C = intermediate_C.astype(np.float64)
    rewards_C[-1:] += outcome
    returns_C: Floats = rewards_C.sum() * rule.gamma**left_C / max(1, count)
    if rule.minus == "nothing":
        return returns_C
    averages_C: Floats = np.cumsum(rewards_C[::-1])[::-1] / left_C
    return returns_C - averages_C


def token_discounted(forest: Forest, intermediate_C: Floats, outcome: float, gamma: float) -> Floats:
    """G of the last trained token of each call; the tokens before it have γ, γ², … of that (`token_shares`).

    Source: REINFORCE++ (arXiv 2501.03262) as verl computes it: G_t = r_t + γ · G_{t+1} over trained tokens alone.
    At a fork of the tree the mean over the calls that continue takes the place of G_{t+1}.
    """
    return _along_the_tree(forest, intermediate_C, outcome, lambda node: gamma ** trained_tokens(node))


def token_shares(node: Node, gamma: float) -> Floats:
    """[S] what each trained token of a call has of the return of the last one: γ², γ, 1 for three tokens."""
    return gamma ** np.arange(trained_tokens(node) - 1, -1, -1, dtype=np.float64)


def trained_tokens(node: Node) -> int:
    """The number of the call's tokens that the loss may see."""
    return len(node.call.trained_places()) if node.call.learnable else 0


def _along_the_tree(forest: Forest, intermediate_C: Floats, outcome: float, share: Callable[[Node], float]) -> Floats:
    """Args: share: what the calls before a call see of its return"""
    returns: dict[int, float] = {}
    # Children follow their parents.
    for node, reward in zip(reversed(forest.nodes), reversed(intermediate_C.tolist()), strict=True):
        after = [share(child) * returns[id(child)] for child in node.children]
        returns[id(node)] = reward + (sum(after) / len(after) if after else outcome)
    return np.array([returns[id(node)] for node in forest.nodes])
