"""Judgements on a run's document: combinations that can never train, or do not mean what they say, with their remedies.

The API refuses a new run or a continued one for the first kind, and returns the second kind as alarms, which the run
keeps. Stored documents are not judged when they are read, so that a new rule stops no run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath

from leyden.libs.contracts.config import BypassCorrection, Computation, GroupAgent, Reward, RunConfig
from leyden.libs.contracts.config.graders import CODE, Container, RelativeModel
from leyden.libs.contracts.judgements.finding import Judgement, Severity
from leyden.libs.contracts.judgements.rewards import judge_rewards

COMPARING = frozenset({"mean", "mean_std", "leave_one_out", "opo"})
"""Baselines that compare the rollouts of a group."""
GREEDY_BELOW = 1e-6
LARGE_LAG = 2
BFLOAT16_GAP = 0.045
SCRIPTS = frozenset({".py", ".sh", ".js", ".ts", ".rb"})


@dataclass(frozen=True)
class Rule:
    """A combination, the path of the field to change, and what is said of it."""

    path: str
    severity: Severity
    holds: Callable[[RunConfig], bool]
    reason: str
    remedy: str

    def judgement(self, place: str = "") -> Judgement:
        """Args: place: where the document has these settings, with a dot at its end"""
        return Judgement(place + self.path, self.severity, self.reason, self.remedy)


def _several_updates(run: RunConfig) -> bool:
    return run.algorithm.mini_batches * run.algorithm.epochs > 1


def _is_uncorrected(run: RunConfig, algorithm: str) -> bool:
    stale = run.sampling.max_policy_lag >= LARGE_LAG and run.algorithm.decoupled is None
    return run.algorithm.type == algorithm and (stale or _several_updates(run))


def _chosen_tasks_stop(run: RunConfig) -> bool:
    stopping, sampling = run.training.early_stopping, run.sampling
    by_reward = stopping is not None and stopping.metric == "train_reward"
    return by_reward and (sampling.curriculum is not None or sampling.refill_zero_variance > 0)


def _one_step_decides(run: RunConfig) -> bool:
    stopping = run.training.early_stopping
    if stopping is None or stopping.metric != "train_reward":
        return False
    return stopping.patience is not None and stopping.average_over == 1


def _has_rewards_from_outside_alone(run: RunConfig) -> bool:
    has_others = run.runner.stdout_reward or run.runner.grant_reward or run.credit.air
    return run.reward is None and not has_others


def _is_greedy(run: RunConfig) -> bool:
    temperature, override = run.sampling.temperature, run.sampling.override
    decides = override != "keep" and override.temperature is not None
    return temperature is not None and temperature < GREEDY_BELOW and not decides


def _is_a_group_of_one_compared(run: RunConfig) -> bool:
    """False where a teacher alone teaches, or demonstrations: their tokens need no siblings."""
    compares = run.credit.baseline.type in COMPARING and run.algorithm.learns_from_rewards
    return run.sampling.group_size == 1 and compares


def _no_rewards_differ(run: RunConfig) -> bool:
    """Whether no two rewards of components differ by more than `min_spread`, whose default is 0, and rewards teach."""
    shaping, failure = run.credit.shaping, run.sampling.failure_reward
    ends = _reward_ends(run.reward) if run.reward else None
    if not run.algorithm.learns_from_rewards or ends is None or run.credit.air or (shaping and shaping.overlong):
        return False
    ends += [] if failure is None else [failure]
    scale = shaping.scale if shaping else 1.0
    return (max(ends) - min(ends)) * scale <= run.credit.baseline.min_spread


def _reward_ends(reward: Reward) -> list[float] | None:
    """The smallest and the largest total. Built-in graders and judges give 0 to 1 each; None where another source may
    give any number."""
    if any(
        (one.grader is None or isinstance(one.grader, (*CODE, Container))) and one.weight for one in reward.components
    ):
        return reward.clip and list(reward.clip)
    weights = [one.weight for one in reward.components]
    ends = [sum(weight for weight in weights if weight < 0), sum(weight for weight in weights if weight > 0)]
    if reward.total == "weighted_mean":
        ends = [0.0, 1.0]
    return [min(max(end, reward.clip[0]), reward.clip[1]) for end in ends] if reward.clip else ends


def _is_compared_alone(run: RunConfig) -> bool:
    """Whether each component that earns something is a comparison of siblings."""
    graders = [one.grader for one in run.reward.components if one.weight] if run.reward else []
    return bool(graders) and all(isinstance(one, RelativeModel) for one in graders)


def _lacks_its_files(run: RunConfig) -> bool:
    return any(_names_a_missing_file(one) for one in run.group_agents)


def _names_a_missing_file(one: GroupAgent) -> bool:
    scripts = [word for word in one.agent.command if PurePath(word).suffix in SCRIPTS and " " not in word]
    relative = any(word[0] not in "/{" for word in scripts)
    return one.runner.type in {"process", "container"} and one.agent.directory is None and relative


RULES: tuple[Rule, ...] = (
    Rule(
        "sampling.group_size",
        "cannot",
        _is_a_group_of_one_compared,
        "a group of one has no siblings to compare, so every advantage is 0",
        "write 2 or more, or credit.baseline.type 'ema' (recipe 'online')",
    ),
    Rule(
        "sampling.temperature",
        "cannot",
        _is_greedy,
        "calls at temperature 0 never train",
        "write 1, or leave it out, or set sampling.override; training.steps 0 evaluates at temperature 0",
    ),
    Rule(
        "algorithm.critic.warmup_steps",
        "cannot",
        lambda run: run.algorithm.critic is not None and run.algorithm.critic.warmup_steps >= run.training.steps,
        "the policy learns in none of training.steps, only its critic",
        "write fewer, or raise training.steps",
    ),
    Rule(
        "credit.baseline.min_spread",
        "cannot",
        _no_rewards_differ,
        "no two rewards of reward.components differ by more than this, so every advantage is 0",
        "write less than the sum of the components' weights, or 0",
    ),
    Rule(
        "agent.directory",
        "warns",
        _lacks_its_files,
        "agent.command names a file of the working folder, which is empty without a directory",
        "write the folder that holds the agent's files, or the file's absolute path",
    ),
    Rule(
        "algorithm.clip_high",
        "warns",
        lambda run: run.algorithm.type in {"ppo_clip", "gspo"} and run.algorithm.clip_high == 0,
        "a clip of 0 takes the gradient from every token with a positive advantage whose probability has risen at all",
        "write the type's default, by leaving it out",
    ),
    Rule(
        "algorithm.clip_low",
        "warns",
        lambda run: run.algorithm.type in {"ppo_clip", "gspo"} and run.algorithm.clip_low == 0,
        "a clip of 0 takes the gradient from every token with a negative advantage whose probability has fallen at all",
        "write the type's default, by leaving it out",
    ),
    Rule(
        "training.max_logprob_gap",
        "warns",
        lambda run: run.training.precision == "bfloat16" and run.training.max_logprob_gap < BFLOAT16_GAP,
        "right implementations differ by 0.035 to 0.045 in bfloat16, so that the run fails",
        "write 0.1, or training.precision 'float32'",
    ),
    Rule(
        "optimizer.warmup_steps",
        "warns",
        lambda run: run.optimizer.warmup_steps > run.training.steps,
        "training ends before the learning rate has its full size",
        "write at most training.steps",
    ),
    Rule(
        "algorithm.correction",
        "warns",
        lambda run: run.algorithm.type == "gspo" and isinstance(run.algorithm.correction, BypassCorrection),
        "with 'bypass' the ratios of gspo hold the difference between trainer and engine, which in bfloat16 is a"
        " hundred times its clip",
        "write correction 'decoupled' with mini_batches above 1, or leave it out: the trainer's device decides",
    ),
    Rule(
        "algorithm.type",
        "warns",
        lambda run: _is_uncorrected(run, "reinforce"),
        "'reinforce' is biased for tokens of older versions and for later updates of a step",
        "write sampling.max_policy_lag 1 or less with one update a step, or type 'ppo_clip'",
    ),
    Rule(
        "algorithm.type",
        "warns",
        lambda run: _is_uncorrected(run, "importance_sampling"),
        "nothing bounds the ratios of 'importance_sampling' for tokens of older versions and for later updates of a"
        " step",
        "write sampling.max_policy_lag 1 or less with one update a step, or type 'ppo_clip' or 'cispo'",
    ),
    Rule(
        "training.early_stopping.metric",
        "warns",
        _chosen_tasks_stop,
        "a curriculum and refills choose which rewards 'train_reward' sees, so that it need not rise",
        "write metric 'evaluation_reward'",
    ),
    Rule(
        "training.early_stopping.average_over",
        "warns",
        _one_step_decides,
        "each step has other tasks, so that 'patience' waits for a step that beats the one with the easiest tasks",
        "write metric 'evaluation_reward', or average_over so large that its steps go through all tasks",
    ),
    Rule(
        "sampling.group_size",
        "cannot",
        lambda run: run.sampling.group_size == 1 and _is_compared_alone(run),
        "relative_model compares the rollouts of a group, and a group of one has nothing to compare",
        "write 2 or more, or a grader score_model",
    ),
    Rule(
        "reward.components",
        "warns",
        lambda run: run.evaluation is not None and _is_compared_alone(run),
        "scores of relative_model compare siblings, so that they do not rise from step to step or between evaluations",
        "add a component beside it that is no comparison, with weight 0 as a metric",
    ),
    Rule(
        "runner.stdout_reward",
        "warns",
        _has_rewards_from_outside_alone,
        "nothing waits for rewards from outside: a rollout that has none when its group ends earns 0",
        "write reward.components with from: feedback, and reward.wait",
    ),
)


def judge(run: RunConfig, computation: Computation | None = None) -> list[Judgement]:
    """Returns what is wrong with a run's graders, and the rules that hold for a run that trains, its further policies
    included.

    Args: computation: how the run's trainer computes, or would on its machine; None where that is unknown

    >>> sampling = {"group_size": 1, "min_siblings": 1}
    >>> online = {"name": "a", "dataset": "b", "agent": {"command": ["c"]}, "sampling": sampling}
    >>> [(one.path, one.severity) for one in judge(RunConfig.model_validate(online))]
    [('sampling.group_size', 'cannot')]
    """
    found = judge_rewards(run.reward)
    if run.training.steps == 0:
        return found
    if computation is not None:
        # The correction stays the document's own: rules are about one that it names.
        run = run.model_copy(update={"training": computation.of_training(run.training)})
    own = [rule for rule in RULES if rule.holds(run)]
    found += [rule.judgement() for rule in own]
    for name in run.served_policies:
        policy = run.policy_document(name)
        others = [rule for rule in RULES if policy.training.steps and rule not in own and rule.holds(policy)]
        found += [rule.judgement(f"policies.{name}.") for rule in others]
    return found
