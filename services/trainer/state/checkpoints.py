"""The tensors of a checkpoint: optimiser moments, random state, and weights that no version holds."""

from __future__ import annotations

import torch
from torch import Tensor

from leyden.services.trainer.model.lora import has_adapters
from leyden.services.trainer.step.learner import Learner

STATE_NAME = "optimizer.safetensors"
MANIFEST_NAME = "progress.json"
"""The high-water mark, and the hash of each file."""
ROUNDED = torch.bfloat16
"""The type of versions whose checkpoint has the weights, too."""
VALUES = "value_head."
WEIGHTS = "weights."
RANDOM = "random"


def checkpoint_state(learner: Learner) -> dict[str, Tensor]:
    """Maps `<parameter number>.<name>` to the optimiser's own tensor, and `random` to a copy of the random state.

    A critic's value head, or its model, which no version exports, is in it as `value_head.<name>`, and weights that a
    version rounds as `weights.<name>`.

    The optimiser's next update changes the tensors in place. Rates and betas are not state: they come from the run's
    document.
    """
    moments = learner.optimizer.state_dict()["state"].items()
    flat = {f"{number}.{name}": tensor for number, named in moments for name, tensor in named.items()}
    rounded = learner.export_dtype is not None and not has_adapters(learner.model)
    master = master_weights(learner) if rounded else {}
    return {**flat, **critic_weights(learner), **master, RANDOM: torch.get_rng_state()}


def critic_weights(learner: Learner) -> dict[str, Tensor]:
    """The critic's own tensors by their names in a checkpoint."""
    return {} if learner.values is None else learner.values.state_dict(prefix=VALUES)


def master_weights(learner: Learner) -> dict[str, Tensor]:
    """The policy's tensors by their names in a checkpoint."""
    return {WEIGHTS + name: tensor for name, tensor in learner.weights.items()}
