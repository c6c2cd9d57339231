"""Rules against rewards that rise by another way than better answers: trends of rewards, components and lengths."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from sqlalchemy import text

from leyden.libs.contracts.alarms import ALARM_RULES, Finding
from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.config.graders import RelativeModel, ScoreModel
from leyden.libs.contracts.config.reward import Component
from leyden.libs.store.alarms.trends import jump, mean_deviates, trend
from leyden.libs.store.database import ReadSession
from leyden.libs.store.read.best import measured_tasks, own_evaluations
from leyden.libs.store.rewards import SIBLING, step_mean

TREND_STEPS, LEAST_STEPS = ALARM_RULES["component_rises_alone"].window, ALARM_RULES["component_rises_alone"].at_least
"""The newest steps, whose trends are judged; fewer have none."""
FIRST_STEPS = 10
"""The steps with which lengths are compared."""
JUMP_STEPS = 5
"""The newest steps whose jumps are shown."""
GROWTH = 1.5
"""Answers that are less longer than before raise no alarm."""
MIN_TASKS = 8
"""Fewer held-out tasks prove nothing."""

# Why OFFSET: without it the planner reads the rollouts of all runs. A step shows the numbers that it trained on,
# whatever a later grading says.
_COMPONENTS = text(f"""
    SELECT g.step, w.component, avg(w.value) AS mean,
           coalesce(var_samp(w.value) / count(w.value), 0)::float8 AS squared_error
    FROM step_groups g
    CROSS JOIN LATERAL (
        SELECT * FROM rollouts WHERE group_id = g.group_id AND state = 'finished' AND {SIBLING} OFFSET 0
    ) AS r
    JOIN rollout_rewards w ON w.rollout_id = r.id AND w.attempt = r.attempt AND w.revision = 1
    WHERE g.run_id = :run AND g.step > :after AND abs(w.value) < 1e100
    GROUP BY g.step, w.component ORDER BY g.step
""")  # noqa: S608  # constants alone

# Every sampled token of a rollout is trained by one sample.
_STEPS = text(f"""
    SELECT g.step, {step_mean(":run", "g.step")} AS reward, sum(c.counted_siblings)::float8 AS rollouts,
           sum((c.calls ->> 'calls')::bigint)::float8 AS calls, sum(sampled.tokens)::float8 AS tokens
    FROM step_groups g
    JOIN group_credits c ON c.group_id = g.group_id AND c.run_id = g.run_id
    CROSS JOIN LATERAL (
        SELECT sum(s.trained_tokens) AS tokens FROM samples s WHERE s.run_id = g.run_id AND s.group_id = g.group_id
    ) AS sampled
    WHERE g.run_id = :run AND (g.step <= :first OR g.step > :after)
    GROUP BY g.step ORDER BY g.step
""")  # noqa: S608  # constants alone


@dataclass(frozen=True)
class StepMeans:
    """Means over the rollouts of a step; None where they are unknown. `components`: mean and its squared error."""

    number: int
    reward: float | None = None
    tokens: float | None = None
    calls: float | None = None
    components: Mapping[str, tuple[float, float]] = field(default_factory=dict)


async def of_trends(session: ReadSession, run_id: str, config: RunConfig, made: int) -> AsyncIterator[Finding]:
    """The rules about trends that hold. Args: made: the number of the newest step"""
    after = made - TREND_STEPS
    components: dict[int, dict[str, tuple[float, float]]] = defaultdict(dict)
    if config.reward is not None:
        for row in await session.execute(_COMPONENTS, {"run": run_id, "after": after}):
            components[row.step][row.component] = (row.mean, row.squared_error)
    scope = {"run": run_id, "after": after, "first": FIRST_STEPS}
    steps = [
        StepMeans(row.step, row.reward, _share(row.tokens, row.rollouts), _share(row.calls, row.rollouts), found)
        for row in await session.execute(_STEPS, scope)
        for found in [components[row.step]]
    ]
    newest = [step for step in steps if step.number > after]
    weighed = config.reward.components if config.reward is not None else []
    for one in (*judge_jumps(newest, weighed), *judge_shrinking(steps)):
        yield one
    # A curriculum chooses harder or easier tasks, so that rewards move by themselves.
    if config.sampling.curriculum is not None:
        return
    for one in (*judge_components(newest, weighed), *judge_judges(newest, weighed), *judge_growth(newest)):
        yield one
    rule = ALARM_RULES["held_out_falls"]
    rewards = [step.reward for step in newest if step.reward is not None]
    # Evaluations are read where the training reward rises alone.
    if config.evaluation is not None and len(rewards) >= LEAST_STEPS and trend(rewards) >= rule.limit:
        measured = own_evaluations(await measured_tasks(session, run_id), config)
        means = {one.version: one.means for one in measured if one.is_compared}
        for one in judge_held_out(newest, {version: means[version] for version in sorted(means)[-rule.window :]}):
            yield one


def judge_components(steps: Sequence[StepMeans], components: Sequence[Component]) -> Iterator[Finding]:
    """Components that earn more while the whole reward falls."""
    rule = ALARM_RULES["component_rises_alone"]
    for one in components:
        both = [(step.components[one.name][0], step.reward) for step in steps if one.name in step.components]
        pairs = [(one.weight * value, reward) for value, reward in both if reward is not None]
        if not one.weight or len(pairs) < rule.at_least:
            continue
        earned, rewards = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        surety = min(trend(earned), -trend(rewards))
        if surety >= rule.limit:
            reason = (
                f"component {one.name} earns more ({_course(earned)}) while the whole reward falls"
                f" ({_course(rewards)}) over the last {len(pairs)} steps"
            )
            yield Finding(rule.name, reason, _figures(earned, rewards, surety), subject=one.name)


def judge_judges(steps: Sequence[StepMeans], components: Sequence[Component]) -> Iterator[Finding]:
    """Judges' scores that rise while a metric falls that is no judge's. An agent's own account proves nothing."""
    rule = ALARM_RULES["judge_alone"]
    judges = [one.name for one in components if one.weight > 0 and isinstance(one.grader, ScoreModel)]
    checks = [one.name for one in components if not one.counts and _is_check(one)]
    for judge, check in ((judge, check) for judge in judges for check in checks):
        found = [step.components for step in steps if judge in step.components and check in step.components]
        if len(found) < rule.at_least:
            continue
        scores, values = [one[judge][0] for one in found], [one[check][0] for one in found]
        surety = min(trend(scores), -trend(values))
        if surety >= rule.limit:
            reason = (
                f"the score of the judge {judge} rises ({_course(scores)}) while the metric {check} falls"
                f" ({_course(values)}) over the last {len(found)} steps"
            )
            yield Finding(rule.name, reason, _figures(scores, values, surety), subject=f"{judge}, {check}")


def judge_jumps(steps: Sequence[StepMeans], components: Sequence[Component]) -> Iterator[Finding]:
    """The largest of the newest jumps of each component."""
    rule = ALARM_RULES["component_jump"]
    for one in components:
        found = [(step.number, *step.components[one.name]) for step in steps if one.name in step.components]
        ends = range(max(rule.at_least, len(found) - JUMP_STEPS + 1), len(found) + 1)
        jumps = [
            (jump([mean for _, mean, _ in found[:end]], [math.sqrt(square) for *_, square in found[:end]]), end)
            for end in ends
        ]
        size, end = max(jumps, key=lambda pair: abs(pair[0]), default=(0.0, 0))
        if abs(size) >= rule.limit:
            (_, before, _), (number, mean, _) = found[end - 2], found[end - 1]
            reason = (
                f"the mean of component {one.name} jumped from {before:.3g} to {mean:.3g} in step {number}, by"
                f" {abs(size):.1f} deviations of its changes before"
            )
            figures = {"step": number, "mean": mean, "before": before, "deviations": abs(size)}
            yield Finding(rule.name, reason, figures, subject=one.name)


def judge_growth(steps: Sequence[StepMeans]) -> Iterator[Finding]:
    """Answers that are much longer than at the beginning of these steps, and grow as the reward does."""
    rule = ALARM_RULES["answers_grow"]
    found = [(step.tokens, step.reward) for step in steps if step.tokens is not None and step.reward is not None]
    if len(found) < rule.at_least:
        return
    tokens, rewards = [one[0] for one in found], [one[1] for one in found]
    first, newest = _ends(tokens)
    surety = min(trend(tokens), trend(rewards))
    if newest >= GROWTH * first and surety >= rule.limit:
        reason = (
            f"the trained tokens of a rollout grow ({_course(tokens)}) as the reward rises ({_course(rewards)}) over"
            f" the last {len(found)} steps"
        )
        yield Finding(rule.name, reason, _figures(tokens, rewards, surety))


def judge_shrinking(steps: Sequence[StepMeans]) -> Iterator[Finding]:
    """Tokens or calls of a rollout that have nearly vanished. Args: steps: the first ones and the newest"""
    rule = ALARM_RULES["rollouts_shrink"]
    if not steps or steps[-1].number < rule.at_least:
        return
    for name in ("tokens", "calls"):
        begin = [getattr(one, name) for one in steps if one.number <= FIRST_STEPS]
        first = [value for value in begin if value is not None]
        newest = [value for one in steps[-rule.window :] if (value := getattr(one, name)) is not None]
        if first and newest and fmean(newest) < rule.limit * fmean(first):
            reason = (
                f"a rollout has {fmean(newest):.3g} {'trained ' if name == 'tokens' else ''}{name} in the last"
                f" {len(newest)} steps, {fmean(first):.3g} in the first {FIRST_STEPS}"
            )
            figures = {"newest": fmean(newest), "first": fmean(first), "share": fmean(newest) / fmean(first)}
            yield Finding(rule.name, reason, figures, subject=name)


def judge_held_out(steps: Sequence[StepMeans], means: Mapping[int, Mapping[int, float]]) -> Iterator[Finding]:
    """Held-out rewards that fall while those of training rise.

    Each task has a slope over the versions, and tasks are the sample (Miller, "Adding Error Bars to Evals", arXiv
    2411.00640, section 2.2), so that few versions suffice.

    Args: means: by version and task
    """
    rule = ALARM_RULES["held_out_falls"]
    versions = sorted(means)
    if len(versions) < rule.at_least:
        return
    tasks = sorted(set[int].intersection(*(set(means[version]) for version in versions)))
    # The version of step n is n: the steps after the first of these versions are the training between them.
    rewards = [step.reward for step in steps if step.number > versions[0] and step.reward is not None]
    if len(tasks) < MIN_TASKS or len(rewards) < LEAST_STEPS:
        return
    middle = (len(versions) - 1) / 2
    slopes = [sum((place - middle) * means[one][task] for place, one in enumerate(versions)) for task in tasks]
    surety, rise = -mean_deviates(slopes), trend(rewards)
    if surety >= rule.limit and rise >= rule.limit:
        held_out = [fmean(means[version][task] for task in tasks) for version in versions]
        reason = (
            f"the reward on {len(tasks)} held-out tasks falls from {held_out[0]:.3g} (version {versions[0]}) to"
            f" {held_out[-1]:.3g} (version {versions[-1]}) while that of training rises ({_course(rewards)})"
        )
        figures = {"held_out": held_out[-1], "first": held_out[0], "tasks": len(tasks), "standard_errors": surety}
        yield Finding(rule.name, reason, {**figures, "train_standard_errors": rise})


def _is_check(component: Component) -> bool:
    judged = isinstance(component.grader, ScoreModel | RelativeModel)
    return component.source == "feedback" or (component.grader is not None and not judged)


def _share(total: float | None, rollouts: float | None) -> float | None:
    return total / rollouts if total is not None and rollouts else None


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """The means of the first and of the last quarter."""
    quarter = max(1, len(values) // 4)
    return fmean(values[:quarter]), fmean(values[-quarter:])


def _course(values: Sequence[float]) -> str:
    first, newest = _ends(values)
    return f"{first:.3g} to {newest:.3g}"


def _figures(rising: Sequence[float], other: Sequence[float], surety: float) -> dict[str, float | str]:
    (first, newest), (other_first, other_newest) = _ends(rising), _ends(other)
    figures = {"first": first, "newest": newest, "other_first": other_first, "other_newest": other_newest}
    return {**figures, "standard_errors": surety, "steps": len(rising)}
