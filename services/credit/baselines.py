"""Baselines: from the returns of calls to advantages, among siblings.

The unit of statistics is the rollout. A rollout's value is the mean return of its calls, an anchor's mean is the mean
of its rollouts' values, so a rollout that took more calls does not weigh more. With the rule `identical` a rollout's
value is its total return, and the formulas are those of GRPO, RLOO and Dr. GRPO to the letter.

An anchor is the whole group (`per: rollout`), all calls made in one state (`per: state`, as GiGPO has it), or all calls
of one depth (`per: depth`). An anchor whose rollouts have equal values teaches nothing about one of them against
another: its advantages are 0. So are those of an anchor with one rollout only (verl gives such a rollout its return
unchanged; that is credit without a comparison).

Axes: C calls of all siblings, R rollouts of the anchor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from leyden.services.credit.states import START

Floats = NDArray[np.float64]
Kind = Literal["none", "mean", "mean_std", "leave_one_out", "opo", "value"]

EPSILON = 1e-6
"""ε of GRPO's denominator, as verl and Trinity have it."""
NO_VARIANCE = 1e-9
"""Values of rollouts that differ by no more than this share of the largest return are equal: the rest is rounding."""


@dataclass(frozen=True, slots=True)
class Siblings:
    """The returns to compare: each call of a group's siblings, [C], then siblings without calls as one of length 0.

    anchors_C: the anchor of each call; lengths_C: its trained tokens, by which `opo` weighs.
    """

    returns_C: Floats
    rollouts_C: NDArray[np.object_]
    anchors_C: NDArray[np.object_]
    lengths_C: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        returns_C: Floats,
        rollouts_C: Sequence[str],
        callless: Mapping[str, float],
        *,
        anchors_C: Sequence[str] | None = None,
        lengths_C: Sequence[int] | None = None,
    ) -> Siblings:
        """Args: rollouts_C: the rollout of each call; callless: the return of siblings without calls, which ended in
        the first anchor; anchors_C: None compares the whole group; lengths_C: None weighs calls alike
        """
        count, more = len(returns_C), len(callless)
        return cls(
            np.concatenate([returns_C, np.array(list(callless.values()), np.float64)]),
            np.array([*rollouts_C, *callless], dtype=object),
            np.array([*(anchors_C or [START] * count), *[START] * more], dtype=object),
            np.array([*(lengths_C or [1] * count), *[0] * more], dtype=np.int64),
        )


@dataclass(frozen=True, slots=True)
class Advantages:
    """Both [C]: what was subtracted from each return, and what came of it."""

    baselines_C: Floats
    advantages_C: Floats


def advantages(kind: Kind, siblings: Siblings, min_spread: float = 0.0) -> Advantages:
    """One statistic per anchor, over the calls that siblings made in it.

    Source: for states GiGPO, arXiv 2505.10978, the step-level advantage A^S; differs in that a rollout which was in a
    state several times counts there once, with its mean.
    """
    result = Advantages(np.zeros_like(siblings.returns_C), np.zeros_like(siblings.returns_C))
    for anchor in dict.fromkeys(siblings.anchors_C):
        where = siblings.anchors_C == anchor
        found = _compared(
            kind, siblings.returns_C[where], siblings.rollouts_C[where], siblings.lengths_C[where], min_spread
        )
        result.baselines_C[where] = found.baselines_C
        result.advantages_C[where] = found.advantages_C
    return result


def gigpo(
    kind: Kind, siblings: Siblings, totals: Mapping[str, float], state_weight: float, min_spread: float = 0.0
) -> Advantages:
    """A = A_E + ω · A_S: that of the rollout's total return in its group, and that of the call's return in its anchor.

    Source: GiGPO, arXiv 2505.10978, equation 8; `mean_std` divides both by their standard deviation, `mean` neither.
    Args:   totals: the total return of each rollout, without discount
    """
    totals_C = np.array([totals[name] for name in siblings.rollouts_C])
    episode = advantages(
        kind, replace(siblings, returns_C=totals_C, anchors_C=np.full_like(siblings.anchors_C, START)), min_spread
    )
    state = advantages(kind, siblings, min_spread)
    return Advantages(
        episode.baselines_C + state_weight * state.baselines_C,
        episode.advantages_C + state_weight * state.advantages_C,
    )


def against(averages: Mapping[str, float], siblings: Siblings) -> Advantages:
    """Every return less its anchor's number from outside the siblings; without one, the mean and no advantage.

    The numbers are the run's moving averages (`ema`), or the values of the group's greedy rollout: ReMax,
    arXiv 2310.10505, A = G - G of greedy decoding. No call has an advantage if the value of every rollout
    equals the number.
    """
    found = Advantages(np.zeros_like(siblings.returns_C), np.zeros_like(siblings.returns_C))
    for anchor in dict.fromkeys(siblings.anchors_C):
        where = siblings.anchors_C == anchor
        returns_c = siblings.returns_C[where]
        average = averages.get(anchor)
        values_r = _values(returns_c, siblings.rollouts_C[where])
        found.baselines_C[where] = values_r.mean() if average is None else average
        if average is not None and np.abs(values_r - average).max() > NO_VARIANCE * np.abs(returns_c).max():
            found.advantages_C[where] = returns_c - average
    return found


def values(siblings: Siblings) -> dict[str, float]:
    """The mean over rollouts of the mean return of their calls, by anchor."""
    return {
        anchor: float(_values(siblings.returns_C[where], siblings.rollouts_C[where]).mean())
        for anchor in dict.fromkeys(siblings.anchors_C)
        for where in [siblings.anchors_C == anchor]
    }


def moved(decay: float, value: float, baseline: float) -> float:
    """The moving average after a group of mean value `value`, which had `baseline`: a group never has part in its own.

    Source: the role-conditioned baseline of SPIRAL (arXiv 2506.24119) and prime-rl; differs in that its own return
    moves it only for later groups.
    """
    return decay * baseline + (1 - decay) * value


def _values(returns_C: Floats, rollouts_C: NDArray[np.object_]) -> Floats:
    """[R]: the mean return of each rollout's calls."""
    owner_C = np.unique(rollouts_C, return_inverse=True)[1].reshape(-1)
    return np.bincount(owner_C, weights=returns_C) / np.bincount(owner_C)


def _compared(
    kind: Kind, returns_C: Floats, owners_C: NDArray[np.object_], lengths_C: NDArray[np.int64], min_spread: float
) -> Advantages:
    """The advantages of siblings that are compared with each other. With returns [1, 0, 0.5, 0] of four rollouts:

    none, value    A = G                               [1, 0, 0.5, 0]  a critic subtracts its values in the trainer
    mean           A = G - mean                        [0.625, -0.375, 0.125, -0.375]  Dr. GRPO's, arXiv 2503.20783
    mean_std       A = (G - mean) / (std + ε)          [1.3056, -0.7833, 0.2611, -0.7833]  GRPO, arXiv 2402.03300
    leave_one_out  A = G - mean of the other rollouts  [0.8333, -0.5, 0.1667, -0.5]  RLOO, arXiv 2402.14740
    opo            A = G - Σ l · G / Σ l               [0.4286, -0.5714, -0.0714, -0.5714] for lengths 6, 3, 4, 1
                                                       OPO, arXiv 2505.23585; l is a rollout's number of trained tokens

    std² = Σ over rollouts of the mean squared distance of their calls' returns from the mean, over R - 1.
    """
    if kind in {"none", "value"}:
        return Advantages(np.zeros_like(returns_C), returns_C.copy())
    owner_C = np.unique(owners_C, return_inverse=True)[1].reshape(-1)
    calls_R = np.bincount(owner_C)
    values_R = np.bincount(owner_C, weights=returns_C) / calls_R
    lengths_R = np.bincount(owner_C, weights=lengths_C)
    weights_R = lengths_R if kind == "opo" and lengths_R.any() else np.ones(len(values_R))
    mean = np.average(values_R, weights=weights_R)
    baselines_C = np.full_like(returns_C, mean)
    if len(values_R) < 2 or np.ptp(values_R) <= max(min_spread, NO_VARIANCE * np.abs(returns_C).max()):
        return Advantages(baselines_C, np.zeros_like(returns_C))
    if kind == "leave_one_out":
        baselines_C = ((values_R.sum() - values_R) / (len(values_R) - 1))[owner_C]
    advantages_C = returns_C - baselines_C
    if kind == "mean_std":
        squares_R = np.bincount(owner_C, weights=advantages_C**2) / calls_R
        advantages_C /= np.sqrt(squares_R.sum() / (len(values_R) - 1)) + EPSILON
    return Advantages(baselines_C, advantages_C)
