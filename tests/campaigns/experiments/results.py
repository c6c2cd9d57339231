"""Figures of an experiment, read from the store, with intervals over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import fmean, stdev

from leyden.libs.client import Client

T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t for two-sided 95 %, by degrees of freedom from 1."""
MAX_SEEDS = len(T_975) + 1


@dataclass(frozen=True)
class Stage:
    """A run of one seed.

    Args: label: the version that its last evaluation measured; base: that of its first, where it is shown; has_curve:
        whether the rewards of its steps are shown; components: of the reward that are shown beside it
    """

    run_id: str
    label: str
    base: str | None = None
    has_curve: bool = False
    components: tuple[str, ...] = ()


@dataclass(frozen=True)
class Seed:
    """Figures of one seed.

    Args: tasks: counted by each evaluation; held_out: the mean reward of each evaluation by label, in order; curves: of
        the rollouts of each step, by the label of their run, and by `LABEL, COMPONENT`, as in `held_out`; step_seconds:
        from the end of a step to that of the next, in the mean, by label; seconds: from the creation of its runs to
        their ends
    """

    seed: int
    runs: list[str]
    tasks: list[int]
    held_out: dict[str, float]
    curves: dict[str, list[float | None]]
    step_seconds: dict[str, float | None]
    seconds: float


def read_seed(client: Client, seed: int, stages: Sequence[Stage]) -> Seed:
    """Returns the figures of completed runs."""
    held_out: dict[str, float] = {}
    curves: dict[str, list[float | None]] = {}
    step_seconds: dict[str, float | None] = {}
    tasks, seconds = list[int](), 0.0
    for stage in stages:
        run = client.run(stage.run_id)
        assert run.finished_at is not None
        seconds += (run.finished_at - run.created_at).total_seconds()
        found = sorted(client.evaluations(stage.run_id), key=lambda one: one.number)
        measured = [one.results.reward for one in found if one.results.reward is not None]
        if stage.base is not None:
            held_out[stage.base] = measured[0].mean
            held_out |= _of_components(client, found[0].id, stage.base, stage.components)
        for one in found[0 if stage.base is None else 1 : -1]:
            if one.results.reward is not None:
                held_out[f"{stage.label}, step {one.policy_version}"] = one.results.reward.mean
        held_out[stage.label] = measured[-1].mean
        held_out |= _of_components(client, found[-1].id, stage.label, stage.components)
        tasks += [one.count for one in measured]
        if stage.has_curve:
            steps = list(client.steps(stage.run_id))
            curves[stage.label] = [step.reward_mean for step in steps]
            step_seconds[stage.label] = mean_seconds([step.created_at for step in steps])
            for name in stage.components:
                curves[f"{stage.label}, {name}"] = [step.components[name].mean for step in steps]
    return Seed(seed, [one.run_id for one in stages], tasks, held_out, curves, step_seconds, seconds)


def mean_seconds(ends: Sequence[datetime]) -> float | None:
    """Returns the mean time between neighbours; None for a single one."""
    return (ends[-1] - ends[0]).total_seconds() / (len(ends) - 1) if len(ends) > 1 else None


def _of_components(client: Client, evaluation: str, label: str, components: Sequence[str]) -> dict[str, float]:
    """The mean of each component over the evaluation's rollouts that have it."""
    if not components:
        return {}
    rollouts = [client.rollout(one.id) for one in client.rollouts(evaluation=evaluation, state="finished")]
    values = {
        name: [
            one.value for each in rollouts for one in each.components if one.component == name and one.value is not None
        ]
        for name in components
    }
    return {f"{label}, {name}": fmean(found) for name, found in values.items() if found}


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Returns the 95 % interval of the mean by Student's t; None for one value, which has no spread.

    >>> interval([0.5]), [round(bound, 4) for bound in interval([0.4, 0.5, 0.6])]
    (None, [0.2516, 0.7484])
    """
    if len(values) < 2:
        return None
    half = T_975[len(values) - 2] * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def shown(values: Sequence[float | None]) -> str:
    """Returns the mean with its interval, where all seeds have a value."""
    found = [one for one in values if one is not None]
    if not found or len(found) < len(values):
        return "–"
    bounds = interval(found)
    mean = f"{fmean(found):.2f}"
    return mean if bounds is None else f"{mean} [{bounds[0]:.2f}, {bounds[1]:.2f}]"
