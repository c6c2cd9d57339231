"""A bandit of four calls with one reward at the end: GAE with a critic against whitened returns."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.samples import RowCall
from leyden.services.trainer.model.forward import Policy
from leyden.services.trainer.model.value_model import ValueModel
from leyden.services.trainer.rows.batch import Sample, trained_tokens
from leyden.services.trainer.step.gradients import batch_logprobs, plan_batch
from leyden.services.trainer.step.learner import Learner
from leyden.services.trainer.step.optimizers import make_optimizer
from leyden.services.trainer.step.step import optimizer_step
from tests.unit.trainer.cases import sample, tiny_llama
from tests.unit.trainer.test_step import CPU

GOOD, BAD, CALLS, TASKS = 7, 9, 4, 4


def row(task: int, arms: list[int], number: int, reward: float = 0.0) -> Sample:
    """A prompt that names the task, and a call for each arm behind an observation."""
    tokens = [1, 20 + task, *(token for call, arm in enumerate(arms) for token in (30 + call, arm))]
    places = range(3, 3 + 2 * len(arms), 2)
    calls = [RowCall(f"{number}.{c}", f"{number}.{c - 1}" if c else None, 0.0, 1.0, p, p) for c, p in enumerate(places)]
    calls[-1] = replace(calls[-1], reward=reward)
    return Sample(
        **{
            **vars(sample(f"run.{number}.0", tokens, [0, 0, *(0, 1) * len(arms)], advantage=reward)),
            "calls": tuple(calls),
        }
    )


def logprobs(learner: Learner, rows: list[Sample]) -> NDArray[np.float64]:
    tokens = trained_tokens(rows)
    return batch_logprobs(learner.policy, plan_batch(rows, tokens, 512), len(tokens), CPU).reshape(len(rows), -1)


def probability_of_good(learner: Learner, calls: int) -> float:
    """That of the good arm beside the bad one, over calls and tasks."""
    good, bad = (
        np.exp(logprobs(learner, [row(task, [arm] * calls, task) for task in range(TASKS)])) for arm in (GOOD, BAD)
    )
    return float((good / (good + bad)).mean())


def share_of_good(seed: int, trunk: str | None, steps: int = 30, size: float = 1.0) -> float:
    """The policy's probability of the good arm beside the bad one, over calls and tasks.

    The reward is the task's number + the share of good arms: most of its variance is the task's, which values explain.

    Args: trunk: of the critic, None for none; size: multiplies rewards
    """
    critic = trunk is not None
    values = {"trunk": trunk, "learning_rate": 0.03, "value_clip": None} if trunk else None
    algorithm = {"type": "ppo_clip", "critic": values}
    document = {
        **{"name": "n", "dataset": "d", "agent": {"command": ["x"]}, "algorithm": algorithm},
        "optimizer": {"learning_rate": 3e-3},
        # Both whiten advantages over the batch: the values are the only difference.
        "credit": {"baseline": {"type": "value"} if critic else {"type": "none", "whiten": True}},
    }
    config = RunConfig.model_validate(document)
    policy = Policy(tiny_llama(seed, torch.float32), values=trunk == "shared")
    own = ValueModel(tiny_llama(seed, torch.float32)) if trunk == "own" else None
    optimizer = make_optimizer(policy, config.optimizer, config.algorithm.critic, own)
    learner = Learner(policy, optimizer, CPU, value_model=own)
    random = np.random.default_rng(seed)
    for step in range(steps):
        rows = []
        for number in range(8):
            task, arms = int(random.integers(TASKS)), random.choice([GOOD, BAD], CALLS).tolist()
            rows.append(row(task, arms, 8 * step + number, size * (task + arms.count(GOOD) / CALLS)))
        for one, own in zip(rows, logprobs(learner, rows), strict=True):
            one.generator_logprobs[one.mask] = own
        optimizer_step(learner, rows, config)
    return probability_of_good(learner, CALLS)


@pytest.mark.parametrize(
    ("seed", "trunk", "size"), [(0, "shared", 1.0), (1, "shared", 100.0), (0, "own", 1.0), (1, "own", 1.0)]
)
def test_a_critic_learns_a_delayed_reward_that_whitened_returns_do_not(seed: int, trunk: str, size: float) -> None:
    assert share_of_good(seed, trunk, size=size) > share_of_good(seed, None) + 0.1
