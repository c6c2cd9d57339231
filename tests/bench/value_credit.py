"""Ten calls with one reward after the last: credit by returns among siblings against credit by a critic's values.

`python -m tests.bench.value_credit` prints the table of docs/how-to/algorithms.md: the probability of the good arm
beside the bad one, as the mean over seeds with the 95 % interval of Student's t.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch

from leyden.libs.contracts.config import RunConfig
from leyden.services.credit.baselines import Siblings, advantages
from leyden.services.trainer.model.forward import Policy
from leyden.services.trainer.rows.batch import Sample
from leyden.services.trainer.step.learner import Learner
from leyden.services.trainer.step.optimizers import make_optimizer
from leyden.services.trainer.step.step import optimizer_step
from tests.unit.trainer.cases import tiny_llama
from tests.unit.trainer.test_delayed_reward import BAD, GOOD, TASKS, logprobs, probability_of_good, row
from tests.unit.trainer.test_step import CPU

CALLS, GROUPS, SIBLINGS, SEEDS = 10, 2, 4, 5
MEASURED = (5, 10, 20)
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 10: 2.262}
"""Student's t for a two-sided interval of 95 %, by the number of seeds."""


def of_siblings(rule: str, gamma: float, per: str) -> dict[str, Any]:
    """Credit without a critic."""
    rule_ = {"type": rule, **({"gamma": gamma} if rule == "discounted" else {})}
    return {"credit": {"rule": rule_, "baseline": {"type": "mean", "per": per, "whiten": True}}}


def of_critic(gae_lambda: float) -> dict[str, Any]:
    """A value before each call, as in tests/unit/trainer/test_delayed_reward.py."""
    critic = {"per": "call", "gae_lambda": gae_lambda, "learning_rate": 0.03, "value_clip": None}
    return {"algorithm": {"type": "ppo_clip", "critic": critic}, "credit": {"baseline": {"type": "value"}}}


VARIANTS = {
    "`identical`, `baseline: mean`": of_siblings("identical", 1.0, "rollout"),
    "`discounted` γ 0.95, `per: depth`": of_siblings("discounted", 0.95, "depth"),
    "critic `per: call`, λ 0.95": of_critic(0.95),
    "critic `per: call`, λ 0: value differences": of_critic(0.0),
}


def with_advantages(samples: list[Sample], rewards: list[float], config: RunConfig) -> None:
    """Writes the advantages of a group's calls into its samples; a critic needs none."""
    rule, baseline = config.credit.rule, config.credit.baseline
    if baseline.type == "value":
        return
    gamma = rule.gamma if rule.type == "discounted" else 1.0
    returns = np.outer(rewards, gamma ** np.arange(CALLS - 1, -1, -1))
    rollouts = [sample.rollout_id for sample in samples for _ in range(CALLS)]
    depths = [str(call) for _ in samples for call in range(CALLS)] if baseline.per == "depth" else None
    found = advantages("mean", Siblings.of(returns.reshape(-1), rollouts, {}, anchors_C=depths)).advantages_C
    for sample, of_calls in zip(samples, found.reshape(len(samples), CALLS), strict=True):
        sample.advantages[sample.mask] = of_calls


def learned(variant: dict[str, Any], seed: int) -> list[float]:
    """The probability of the good arm after so many steps as `MEASURED` says."""
    document = {"name": "n", "dataset": "d", "agent": {"command": ["x"]}, "optimizer": {"learning_rate": 3e-3}}
    config = RunConfig.model_validate({**document, **variant})
    critic = config.algorithm.critic
    policy = Policy(tiny_llama(seed, torch.float32), values=critic is not None)
    learner = Learner(policy, make_optimizer(policy, config.optimizer, critic), CPU)
    random, found = np.random.default_rng(seed), []
    for step in range(1, max(MEASURED) + 1):
        rows: list[Sample] = []
        for group in range(GROUPS):
            task = int(random.integers(TASKS))
            arms = sampled(random)
            rewards = [task + one.count(GOOD) / CALLS for one in arms]
            numbers = range(SIBLINGS * (GROUPS * step + group), SIBLINGS * (GROUPS * step + group + 1))
            siblings = [row(task, *one) for one in zip(arms, numbers, rewards, strict=True)]
            with_advantages(siblings, rewards, config)
            rows += siblings
        for one, own in zip(rows, logprobs(learner, rows), strict=True):
            one.generator_logprobs[one.mask] = own
        optimizer_step(learner, rows, config)
        if step in MEASURED:
            found.append(probability_of_good(learner, CALLS))
    return found


def sampled(random: np.random.Generator) -> list[list[int]]:
    """Arms of a group, uniformly: no variant explores more than another because it learned sooner."""
    return [random.choice([GOOD, BAD], CALLS).tolist() for _ in range(SIBLINGS)]


def interval(values: list[float]) -> str:
    """The mean and half of its interval."""
    half = T_95[len(values)] * float(np.std(values, ddof=1)) / len(values) ** 0.5
    return f"{np.mean(values):.3f} ± {half:.3f}"


def main() -> None:
    """Prints a row per variant."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.value_credit", description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, choices=sorted(T_95))
    seeds = parser.parse_args().seeds
    torch.set_num_threads(1)
    print("| credit |" + "".join(f" {steps} steps |" for steps in MEASURED))
    print("|---|" + "--:|" * len(MEASURED))
    for name, variant in VARIANTS.items():
        runs = zip(*(learned(variant, seed) for seed in range(seeds)), strict=True)
        print(f"| {name} |" + "".join(f" {interval(list(values))} |" for values in runs), flush=True)


if __name__ == "__main__":
    main()
