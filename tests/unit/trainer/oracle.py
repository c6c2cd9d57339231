"""The fixed 6x6 case that verl, TRL, slime, prime-rl and AReaL computed, flattened to trained tokens."""

import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

VECTORS = json.loads((Path(__file__).parent / "oracles" / "rl-oracle-vectors.json").read_text())
MASK = torch.tensor(VECTORS["inputs"]["mask"], dtype=torch.bool)
ROWS_K = torch.nonzero(MASK)[:, 0]
GROUPS_K = np.array([0, 0, 0, 0, 1, 1])[ROWS_K.numpy()]


def flat(values: list[list[float]]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[MASK]


def column(name: str) -> Tensor:
    return flat(VECTORS["inputs"][name])


ADVANTAGES = flat(VECTORS["advantages"]["grpo(std,eps1e-6)"]["adv"])


def loss(name: str) -> tuple[float, Tensor]:
    """The recorded loss, and its gradient with respect to the log-probabilities of trained tokens."""
    recorded = VECTORS["losses"][name]
    return recorded["loss"], flat(recorded["grad_logprobs"])
