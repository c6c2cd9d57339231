"""Two policies that must choose the same of two arms: trained together against trained one after the other alone.

`python -m tests.bench.coordination` prints the table of docs/how-to/algorithms.md: for each seed the probability that
the two policies choose the same arm. Alone, a policy trains beside the other one's base model.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from leyden.libs.contracts.config import RunConfig
from leyden.services.credit.baselines import Siblings, advantages
from leyden.services.trainer.model.forward import Policy
from leyden.services.trainer.rows.batch import Sample
from leyden.services.trainer.step.learner import Learner
from leyden.services.trainer.step.optimizers import make_optimizer
from leyden.services.trainer.step.step import optimizer_step
from tests.unit.trainer.cases import sample, tiny_llama
from tests.unit.trainer.test_delayed_reward import logprobs
from tests.unit.trainer.test_step import CPU

ARMS = (7, 9)
STEPS, SIBLINGS, SEEDS = 40, 16, 5
CONFIG = RunConfig.model_validate(
    {"name": "n", "dataset": "d", "agent": {"command": ["x"]}, "optimizer": {"learning_rate": 3e-3}}
)


class Player:
    """A policy and what it learns from; `seed` decides its weights, and with them which arm it likes."""

    def __init__(self, seed: int) -> None:
        policy = Policy(tiny_llama(seed, torch.float32))
        self.learner = Learner(policy, make_optimizer(policy, CONFIG.optimizer), CPU)

    @property
    def first(self) -> float:
        """The probability of the first arm beside the second one."""
        first, second = np.exp(logprobs(self.learner, [_row(0, arm) for arm in range(2)]))[:, 0]
        return float(first / (first + second))

    def sampled(self, random: np.random.Generator) -> NDArray[np.int64]:
        """The arms of a group, 0 or 1."""
        return (random.random(SIBLINGS) >= self.first).astype(np.int64)

    def learn(self, arms: NDArray[np.int64], found: NDArray[np.float64]) -> None:
        """Makes one step on a group."""
        rows = [_row(number, arm, advantage) for number, (arm, advantage) in enumerate(zip(arms, found, strict=True))]
        for row, own in zip(rows, logprobs(self.learner, rows), strict=True):
            row.generator_logprobs[row.mask] = own
        optimizer_step(self.learner, rows, CONFIG)


def _row(number: int, arm: int, advantage: float = 0.0) -> Sample:
    return sample(f"run.0.{number}", [1, 30, ARMS[arm]], [0, 0, 1], advantage=advantage)


def train(one: Player, other: Player, learners: tuple[Player, ...], random: np.random.Generator) -> None:
    """Groups of both; a rollout earns 1 where the arms are equal, and its advantage is that of the team."""
    for _ in range(STEPS):
        arms = one.sampled(random), other.sampled(random)
        rewards = (arms[0] == arms[1]).astype(np.float64)
        if rewards.min() == rewards.max():
            continue
        rollouts = [str(number) for number in range(SIBLINGS)]
        found = advantages("mean", Siblings.of(rewards, rollouts, {})).advantages_C
        for player, own in zip((one, other), arms, strict=True):
            if player in learners:
                player.learn(own, found)


def together(seed: int) -> float:
    """Both learn from the same groups."""
    one, other = _pair(seed)
    train(one, other, (one, other), np.random.default_rng(seed))
    return agreement(one, other)


def alone(seed: int) -> float:
    """Each learns beside the base model of the other."""
    random, trained = np.random.default_rng(seed), list[Player]()
    for number in range(2):
        pair = _pair(seed)
        train(*pair, (pair[number],), random)
        trained.append(pair[number])
    return agreement(*trained)


def untrained(seed: int) -> float:
    """Both base models."""
    return agreement(*_pair(seed))


def _pair(seed: int) -> tuple[Player, Player]:
    return Player(2 * seed), Player(2 * seed + 1)


def agreement(one: Player, other: Player) -> float:
    """The probability that both choose the same arm."""
    return one.first * other.first + (1 - one.first) * (1 - other.first)


WAYS: dict[str, Callable[[int], float]] = {
    "base models": untrained,
    "each alone, beside the other's base model": alone,
    "together, with the team's advantage": together,
}


def main() -> None:
    """Prints a row for each way."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.coordination", description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    seeds = range(parser.parse_args().seeds)
    torch.set_num_threads(1)
    print("| trained |" + "".join(f" {seed} |" for seed in seeds))
    print("|---|" + "--:|" * len(seeds))
    for name, way in WAYS.items():
        print(f"| {name} |" + "".join(f" {way(seed):.3f} |" for seed in seeds), flush=True)


if __name__ == "__main__":
    main()
