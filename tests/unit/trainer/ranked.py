"""A few steps of a tiny learner in float64, as one of `torchrun`'s processes: `ranked.py FOLDER`."""

import os
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from leyden.libs.contracts.config import Optimizer, RunConfig
from leyden.services.trainer import tree
from leyden.services.trainer.compute import Interrupted
from leyden.services.trainer.forward import Policy
from leyden.services.trainer.ranks import ALONE, Ranks, join_ranks
from leyden.services.trainer.step import Learner, Metrics, make_optimizer, optimizer_step
from tests.unit.trainer.cases import agent_samples, sample, tiny_llama, tiny_qwen


def three_steps(
    model: str, ranks: Ranks = ALONE, *, asked: bool = False
) -> tuple[list[Metrics], dict[str, torch.Tensor]]:
    """Metrics of three steps, and the weights after them. The second step has too few rows for two ranks. Qwen makes
    four updates a step.

    Args: asked: this rank is asked to stop
    """
    make = {"llama": tiny_llama, "qwen": tiny_qwen}[model]
    several = {"mini_batches": 2, "epochs": 2, "correction": {"type": "decoupled"}} if model == "qwen" else {}
    changes = {
        "optimizer": {"learning_rate": 1e-2, "max_grad_norm": 0.05},
        "algorithm": {"type": "ppo_clip", "kl_coefficient": 0.1, **several},
        "training": {"micro_batch_tokens": 40},
    }
    config = RunConfig.model_validate({"name": "n", "dataset": "d", "agent": {"command": ["x"]}, **changes})
    policy, reference = Policy(make(0)), Policy(make(1))
    optimizer = make_optimizer(policy, Optimizer(learning_rate=1e-2))
    learner = Learner(policy, optimizer, Accelerator(cpu=True), reference, ranks=ranks)
    unmoved = [sample("run.9.0", [1, 2, 3], [0, 0, 1], advantage=0.0)]
    batches = [agent_samples(0, groups=4), [sample("run.0.0", [1, 2, 3, 4], [0, 0, 1, 1])], agent_samples(1, groups=3)]
    metrics = [
        optimizer_step(learner, batch, config, zero_variance=unmoved, interrupted=lambda: asked) for batch in batches
    ]
    return metrics, policy.state_dict()


def main() -> None:
    torch.set_num_threads(1)
    tree.LEAST_TRUNK = 1
    ranks = join_ranks(int(os.environ["WORLD_SIZE"]), on_cpu=True, timeout_seconds=60)
    found = {model: three_steps(model, ranks) for model in ("llama", "qwen")}
    torch.save(found, Path(sys.argv[1]) / f"{ranks.rank}.pt")
    with pytest.raises(Interrupted):
        three_steps("llama", ranks, asked=ranks.rank == 1)
    ranks.close()


if __name__ == "__main__":
    main()
