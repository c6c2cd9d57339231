"""The value head: values in units of the targets that it has seen."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

WINDOW = 10
"""Steps over which mean and deviation run; before the tenth they are those of all steps."""
TARGETS = "targets"
"""The name of a head's buffer."""
LEAST_DEVIATION = 1e-3
"""As a share of the targets' root mean square: rounding alone is no deviation."""


class ValueHead(nn.Linear):
    """A linear map of the last hidden state without a matrix product, which autocast would round; it begins at 0.

    Outputs have a running scale, so that rewards of any size learn alike: errors, gradients and clips are those of
    targets with a deviation of 1. `targets` has the mean and variance of the targets and the number of steps, up to
    `WINDOW`, that they were taken of.

    Source: Pop-Art (arXiv 1602.07714), whose rescaling leaves every value as it is while the scale moves.
    """

    targets: Tensor

    def __init__(self, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(hidden, 1, dtype=dtype, device=device)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)
        self.register_buffer(TARGETS, torch.zeros(3, dtype=dtype, device=device))

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs.to(self.weight.dtype) * self.weight[0]).sum(-1, keepdim=True) + self.bias

    @property
    def scale(self) -> tuple[float, float]:
        """Mean and deviation: a value is the mean and the output times the deviation; 0 and 1 before a target."""
        mean, variance, steps = self.targets.tolist()
        return _scale(mean, variance) if steps else (0.0, 1.0)

    def scale_for(self, targets_U: NDArray[np.float64]) -> tuple[float, float]:
        """That of a step with these targets: the first step has their own, each later one that of the steps before."""
        first = float(self.targets[2]) == 0 and len(targets_U) > 0
        return _scale(float(targets_U.mean()), float(targets_U.var())) if first else self.scale

    @torch.no_grad()
    def follow(self, targets_U: NDArray[np.float64]) -> None:
        """Moves the scale towards a step's targets, after its updates; every value stays what it is."""
        if not len(targets_U):
            return
        mean, variance, steps = self.targets.tolist()
        (old_mean, old_deviation), steps = self.scale_for(targets_U), min(steps + 1, WINDOW)
        moved = float(targets_U.mean()) - mean
        variance += (float(targets_U.var()) + (1 - 1 / steps) * moved**2 - variance) / steps
        self.targets.copy_(torch.tensor([mean + moved / steps, variance, steps], dtype=self.targets.dtype))
        new_mean, deviation = self.scale
        self.weight.mul_(old_deviation / deviation)
        self.bias.mul_(old_deviation).add_(old_mean - new_mean).div_(deviation)


def _scale(mean: float, variance: float) -> tuple[float, float]:
    least = LEAST_DEVIATION * math.sqrt(mean**2 + variance)
    return (mean, max(math.sqrt(variance), least) or 1.0)
