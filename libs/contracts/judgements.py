"""Judgements on a run's document: combinations that can never train, or do not mean what they say, with their remedies.

The API refuses a new run or a continued one for the first kind, and returns the second kind as warnings, which the run
keeps. Stored documents are not judged when they are read, so that a new rule stops no run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from leyden.libs.contracts.config import RunConfig

COMPARING = frozenset({"mean", "mean_std", "leave_one_out", "opo"})
"""Baselines that compare the rollouts of a group."""
GREEDY_BELOW = 1e-6
LARGE_LAG = 2
SMALL_LORA_RATE = 2e-6


@dataclass(frozen=True)
class Rule:
    """A combination, the path of the field to change, and what is said of it."""

    path: str
    verdict: Literal["refused", "warning"]
    holds: Callable[[RunConfig], bool]
    message: str


@dataclass(frozen=True)
class Judgement:
    """A rule that holds for a document."""

    path: str
    verdict: Literal["refused", "warning"]
    message: str


def _several_updates(run: RunConfig) -> bool:
    return run.algorithm.mini_batches * run.algorithm.epochs > 1


def _is_uncorrected(run: RunConfig, algorithm: str) -> bool:
    stale = run.sampling.max_policy_lag >= LARGE_LAG and run.algorithm.correction.type == "bypass"
    return run.algorithm.type == algorithm and (stale or _several_updates(run))


def _chosen_tasks_stop(run: RunConfig) -> bool:
    stopping, sampling = run.training.early_stopping, run.sampling
    by_reward = stopping is not None and stopping.metric == "train_reward"
    return by_reward and (sampling.curriculum is not None or sampling.refill_zero_variance > 0)


RULES: tuple[Rule, ...] = (
    Rule(
        "sampling.group_size",
        "refused",
        lambda run: run.sampling.group_size == 1 and run.credit.baseline.type in COMPARING,
        "a group of one has no siblings to compare, so every advantage is 0: write 2 or more, or"
        " credit.baseline.type 'ema' (recipe 'online')",
    ),
    Rule(
        "sampling.temperature",
        "refused",
        lambda run: run.sampling.temperature is not None and run.sampling.temperature < GREEDY_BELOW,
        "calls at temperature 0 never train: write 1, or leave it out; training.steps 0 evaluates at temperature 0",
    ),
    Rule(
        "algorithm.critic.warmup_steps",
        "refused",
        lambda run: run.algorithm.critic is not None and run.algorithm.critic.warmup_steps >= run.training.steps,
        "the policy learns in none of training.steps, only its critic: write fewer, or raise training.steps",
    ),
    Rule(
        "optimizer.warmup_steps",
        "warning",
        lambda run: run.optimizer.warmup_steps > run.training.steps,
        "training ends before the learning rate has its full size: write at most training.steps",
    ),
    Rule(
        "algorithm.correction",
        "warning",
        lambda run: run.algorithm.type == "gspo" and run.algorithm.correction.type == "bypass",
        "with 'bypass' the ratios of gspo hold the difference between trainer and engine, which in bfloat16 is a"
        " hundred times its clip: write correction 'decoupled' with mini_batches above 1",
    ),
    Rule(
        "algorithm.type",
        "warning",
        lambda run: _is_uncorrected(run, "reinforce"),
        "'reinforce' is biased for tokens of older versions and for later updates of a step: write"
        " sampling.max_policy_lag 1 or less with one update a step, or type 'ppo_clip'",
    ),
    Rule(
        "algorithm.type",
        "warning",
        lambda run: _is_uncorrected(run, "importance_sampling"),
        "nothing bounds the ratios of 'importance_sampling' for tokens of older versions and for later updates of a"
        " step: write sampling.max_policy_lag 1 or less with one update a step, or type 'ppo_clip' or 'cispo'",
    ),
    Rule(
        "optimizer.learning_rate",
        "warning",
        lambda run: run.training.lora is not None and run.optimizer.learning_rate <= SMALL_LORA_RATE,
        "this rate is for the training of all weights, and adapters hardly move with it: write 1e-5 to 1e-4",
    ),
    Rule(
        "training.early_stopping.metric",
        "warning",
        _chosen_tasks_stop,
        "a curriculum and refills choose which rewards 'train_reward' sees, so that it need not rise: write metric"
        " 'evaluation_reward'",
    ),
)


def judge(run: RunConfig) -> list[Judgement]:
    """Returns the rules that hold for a run that trains, its further policies included; none for a run without steps.

    >>> sampling = {"group_size": 1, "min_siblings": 1}
    >>> online = {"name": "a", "dataset": "b", "agent": {"command": ["c"]}, "sampling": sampling}
    >>> [(one.path, one.verdict) for one in judge(RunConfig.model_validate(online))]
    [('sampling.group_size', 'refused')]
    """
    if run.training.steps == 0:
        return []
    own = [rule for rule in RULES if rule.holds(run)]
    found = [Judgement(rule.path, rule.verdict, rule.message) for rule in own]
    for name in run.carried_policies:
        policy = run.policy_run(name)
        others = [rule for rule in RULES if policy.training.steps and rule not in own and rule.holds(policy)]
        found += [Judgement(f"policies.{name}.{rule.path}", rule.verdict, rule.message) for rule in others]
    return found


def warnings_of(run: RunConfig) -> list[str]:
    """Returns the warnings about a document, in words."""
    return [f"{one.path}: {one.message}" for one in judge(run) if one.verdict == "warning"]
