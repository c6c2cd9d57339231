"""Baselines: from the returns of calls to advantages, among siblings.

The unit of statistics is the rollout. A rollout's value is the mean return of its calls, a cell's mean is the mean of
its rollouts' values, so a rollout that took more calls does not weigh more. With the rule `identical` a rollout's
value is its total return, and the formulas are those of GRPO, RLOO and Dr. GRPO to the letter.

A cell is the whole group (`per: rollout`), or all calls made in one state (`per: state`, GiGPO's anchor). A cell whose
rollouts have equal values teaches nothing about one of them against another: its advantages are 0. So are those of a
cell with one rollout only (verl gives such a rollout its return unchanged; that is credit without a comparison).

Axes: C calls of all siblings, R rollouts of the cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from leyden.services.credit.states import START

Floats = NDArray[np.float64]
Kind = Literal["none", "mean", "mean_std", "leave_one_out"]

EPSILON = 1e-6
"""ε of GRPO's denominator, as verl and Trinity have it."""
NO_VARIANCE = 1e-9
"""Values of rollouts that differ by no more than this share of the largest return are equal: the rest is rounding."""


@dataclass(frozen=True, slots=True)
class Advantages:
    """Both [C]: what was subtracted from each return, and what came of it."""

    baselines_C: Floats
    advantages_C: Floats


def advantages_per_rollout(
    kind: Kind, returns_C: Floats, rollouts_C: Sequence[str], callless: dict[str, float]
) -> Advantages:
    """One statistic for the whole group.

    Args: rollouts_C: the rollout of each call; callless: the return of siblings that made no call, which count too
    """
    return advantages_per_state(kind, returns_C, rollouts_C, [START] * len(returns_C), callless)


def advantages_per_state(
    kind: Kind, returns_C: Floats, rollouts_C: Sequence[str], states_C: Sequence[str], callless: dict[str, float]
) -> Advantages:
    """One statistic per state, over the calls that siblings made in it. A sibling without calls ended in the first.

    Source: GiGPO, arXiv 2505.10978, the step-level advantage A^S alone; differs in that a rollout which was
    in a state several times counts there once, with its mean.
    """
    count = len(returns_C)
    returns = np.concatenate([returns_C, np.array(list(callless.values()), np.float64)])
    states = np.array([*states_C, *[START] * len(callless)], dtype=object)
    owners = np.array([*rollouts_C, *callless], dtype=object)
    result = Advantages(np.zeros_like(returns), np.zeros_like(returns))
    for state in dict.fromkeys(states):
        where = states == state
        found = _siblings_in_state(kind, returns[where], owners[where])
        result.baselines_C[where] = found.baselines_C
        result.advantages_C[where] = found.advantages_C
    return Advantages(result.baselines_C[:count], result.advantages_C[:count])


def _siblings_in_state(kind: Kind, returns_C: Floats, owners_C: NDArray[np.object_]) -> Advantages:
    """The advantages of siblings that are compared with each other. With returns [1, 0, 0.5, 0] of four rollouts:

    none           A = G                               [1, 0, 0.5, 0]
    mean           A = G - mean                        [0.625, -0.375, 0.125, -0.375]  Dr. GRPO, arXiv 2503.20783
    mean_std       A = (G - mean) / (std + ε)          [1.3056, -0.7833, 0.2611, -0.7833]  GRPO, arXiv 2402.03300
    leave_one_out  A = G - mean of the other rollouts  [0.8333, -0.5, 0.1667, -0.5]  RLOO, arXiv 2402.14740

    std² = Σ over rollouts of the mean squared distance of their calls' returns from the mean, over R - 1.
    """
    if kind == "none":
        return Advantages(np.zeros_like(returns_C), returns_C.copy())
    owner_C = np.unique(owners_C, return_inverse=True)[1].reshape(-1)
    calls_R = np.bincount(owner_C)
    values_R = np.bincount(owner_C, weights=returns_C) / calls_R
    mean = values_R.mean()
    baselines_C = np.full_like(returns_C, mean)
    if len(values_R) < 2 or np.ptp(values_R) <= NO_VARIANCE * np.abs(returns_C).max():
        return Advantages(baselines_C, np.zeros_like(returns_C))
    if kind == "leave_one_out":
        baselines_C = ((values_R.sum() - values_R) / (len(values_R) - 1))[owner_C]
    advantages_C = returns_C - baselines_C
    if kind == "mean_std":
        squares_R = np.bincount(owner_C, weights=advantages_C**2) / calls_R
        advantages_C /= np.sqrt(squares_R.sum() / (len(values_R) - 1)) + EPSILON
    return Advantages(baselines_C, advantages_C)
