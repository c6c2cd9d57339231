"""The judgement on baseline `monte_carlo`: how much more a step samples."""

from __future__ import annotations

from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.judgements.finding import Judgement


def judge_rerolls(run: RunConfig) -> list[Judgement]:
    """Returns the number of rollouts that a step samples, for a run that re-rolls.

    >>> credit = {"rule": {"type": "identical"}, "baseline": {"type": "monte_carlo", "calls": 2, "samples": 3}}
    >>> run = RunConfig.model_validate({"name": "a", "dataset": "b", "agent": {"command": ["c"]}, "credit": credit})
    >>> judge_rerolls(run)[0].reason
    'up to 6 re-rolls follow each rollout, so that a step samples up to 448 rollouts in place of 64'
    """
    sampling, baseline = run.sampling, run.credit.baseline
    if baseline.type != "monte_carlo" or not run.algorithm.learns_from_rewards:
        return []
    siblings, rerolls = sampling.group_size * sampling.groups_per_step, baseline.calls * baseline.samples
    every = siblings * (1 + rerolls)
    reason = (
        f"up to {rerolls} re-rolls follow each rollout, so that a step samples up to {every} rollouts in place of"
        f" {siblings}"
    )
    return [Judgement("credit.baseline", "warns", reason, "lower calls or samples where that is too much")]
