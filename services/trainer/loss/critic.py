"""The critic: advantages and value targets from a batch's values, and the loss of the values.

Axes: K trained tokens of the batch. A unit is a value with its step in time: a trained token (`per: token`), or a call,
whose value is the one before its first trained token (`per: call`). Tokens that the policy did not sample are no units:
the unit before an observation is followed by the one after it.

A call's reward falls on its last unit. If several calls continue it, all of their first units follow: the next value
and the next advantage are means over them, by the calls' shares. So with λ = 1 the value target of a fork is its
reward and the discounted mean return of its branches, as in the credit rule `discounted`. A trained token is one unit
in however many rows it stands. The last unit of a leaf is followed by nothing, which is worth 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leyden.libs.contracts.config import Critic
from leyden.libs.contracts.samples import RowCall
from leyden.services.trainer.rows.batch import Sample, TrainedTokens, whitened

Floats = NDArray[np.float64]


class Scale(NamedTuple):
    """A value is `mean` + `deviation` times the value head's output."""

    mean: float = 0.0
    deviation: float = 1.0

    def outputs(self, values_K: Floats) -> Floats:
        """Values in units of this scale."""
        return (values_K - self.mean) / self.deviation

    def values(self, outputs_K: Floats) -> Floats:
        """Values in units of the reward."""
        return self.mean + self.deviation * outputs_K


PLAIN = Scale()
"""Outputs that are values themselves."""


@dataclass(frozen=True)
class Estimates:
    """Columns [K] from the values at the start of a batch.

    values_K: those values; advantages_K: whitened over the units, and the same for all tokens of a call under `per:
    call`; returns_K: the values' targets; weights_K: of the value loss, 1 / units, and 0 for a token that is no unit;
    scale: that of the value head's outputs in the step's updates.
    """

    values_K: Floats
    advantages_K: Floats
    returns_K: Floats
    weights_K: Floats
    scale: Scale = PLAIN

    def of(self, tokens_k: NDArray[np.int64]) -> Estimates:
        """Those of some tokens."""
        values_k, advantages_k, returns_k, weights_k = (
            column_K[tokens_k] for column_K in (self.values_K, self.advantages_K, self.returns_K, self.weights_K)
        )
        return Estimates(values_k, advantages_k, returns_k, weights_k, self.scale)

    @property
    def targets(self) -> Floats:
        """The targets of the units."""
        return self.returns_K[self.weights_K > 0]

    def missed(self, outputs_K: Tensor, clip: float | None) -> Tensor:
        """The value loss of the head's outputs for these tokens, in units of `scale`. clip: of `value_loss`"""
        columns = (self.scale.outputs(self.values_K), self.scale.outputs(self.returns_K), self.weights_K)
        old_K, targets_K, weights_K = (torch.from_numpy(column_K).to(outputs_K) for column_K in columns)
        return value_loss(outputs_K, old_K, targets_K, weights_K, clip)

    def weighted(self) -> Estimates:
        """The same with weights that sum to 1: those of a mini-batch count its own units."""
        return replace(self, weights_K=self.weights_K / max(self.weights_K.sum(), 1e-300))

    def metrics(self) -> dict[str, float]:
        """Explained variance is 1 - Var(target - value) / Var(target): 1 is a perfect critic, 0 a constant one;
        unknown where all targets are equal."""
        unit_K = self.weights_K > 0
        values, returns = self.values_K[unit_K], self.targets
        found = {"value_mean": float(values.mean())} if len(values) else {}
        spread = float(returns.var()) if len(returns) else 0.0
        if spread > 0:
            found["value_explained_variance"] = 1 - float((returns - values).var()) / spread
        return found


def estimate(critic: Critic, samples: Sequence[Sample], tokens: TrainedTokens, values_K: Floats) -> Estimates:
    """Generalised advantage estimation over the call trees: δ = r + γV' - V, A = δ + γλA', return = A + V.

    One chain of two tokens with values 0.5 and 0.5, reward 1 at its end, γ = 1 and λ = 0.95 gives δ = 0 and 0.5,
    advantages 0.475 and 0.5, and returns 0.975 and 1.

    Args:   tokens: `trained_tokens(samples)`; values_K: of the state before each
    Raises: ValueError: a trained token belongs to no call, or a call continues one that no row before it trains
    Source: GAE (arXiv 1506.02438) equation 16; advantages are whitened as in verl's `compute_gae_advantage_return`
    """
    advantages_K, weights_K = np.zeros(len(tokens)), np.zeros(len(tokens))
    after: dict[str, tuple[float, float]] = {}
    calls = list(_places(samples, tokens))
    for call, first, last in reversed(calls):
        units = range(first, last) if critic.per == "token" else range(first, first + 1)
        reward, (value, advantage) = call.reward, after.get(call.id, (0.0, 0.0))
        for k in reversed(units):
            delta = reward + critic.gamma * value - values_K[k]
            value, advantage, reward = values_K[k], delta + critic.gamma * critic.gae_lambda * advantage, 0.0
            advantages_K[k], weights_K[k] = advantage, 1.0
        if call.parent is not None:
            next_value, next_advantage = after.get(call.parent, (0.0, 0.0))
            after[call.parent] = next_value + call.share * value, next_advantage + call.share * advantage
    unit_K = weights_K > 0
    returns_K = np.where(unit_K, advantages_K + values_K, 0.0)
    advantages_K[unit_K] = whitened(advantages_K[unit_K])
    for _, first, last in calls if critic.per == "call" else ():
        advantages_K[first:last] = advantages_K[first]
    return Estimates(values_K, advantages_K, returns_K, weights_K / max(1, unit_K.sum()))


def value_loss(
    values_K: Tensor, old_values_K: Tensor, returns_K: Tensor, weights_K: Tensor, clip: float | None
) -> Tensor:
    """½ Σ weight · max((V - R)², (clip(V, V_old ± c) - R)²).

    Source: PPO as OpenAI's baselines implement it; verl's `compute_value_loss`. c is absolute, in units of the values.
    """
    losses_K = (values_K - returns_K) ** 2
    if clip is not None:
        bounded_K = torch.clamp(values_K, old_values_K - clip, old_values_K + clip)
        losses_K = torch.maximum(losses_K, (bounded_K - returns_K) ** 2)
    return 0.5 * (losses_K * weights_K).sum()


def _places(samples: Sequence[Sample], tokens: TrainedTokens) -> list[tuple[RowCall, int, int]]:
    """Each call with the range of its trained tokens within K; parents come before children."""
    found: dict[str, tuple[RowCall, int, int]] = {}
    starts_N = np.searchsorted(tokens.rows_K, np.arange(len(samples) + 1))
    for row, sample in enumerate(samples):
        start, positions = int(starts_N[row]), tokens.positions_K[starts_N[row] : starts_N[row + 1]]
        for call in sample.calls:
            if call.parent is not None and call.parent not in found:
                raise ValueError(f"sample {sample.id}: call {call.id} continues one that no row before it trains")
            first, last = np.searchsorted(positions, [call.begin, call.end + 1])
            found[call.id] = call, start + int(first), start + int(last)
    if sum(last - first for _, first, last in found.values()) != len(tokens):
        raise ValueError("a critic needs the call of every trained token: credit these groups again")
    return list(found.values())
