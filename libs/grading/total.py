"""The total of a rollout's components: the one place that computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from leyden.libs.contracts.config import Component, Reward
from leyden.libs.contracts.rewards import is_reward, reaches
from leyden.libs.contracts.states import ComponentState
from leyden.libs.grading.grade import Grade


@dataclass(frozen=True)
class Total:
    """A rollout's reward; null where it has none, for the `reason`.

    Args: contributions: the part of each component in the total before gates and `clip`
    """

    value: float | None
    reason: str | None = None
    contributions: Mapping[str, float] = field(default_factory=dict)


def total(reward: Reward, grades: Mapping[str, Grade]) -> Total:
    """Returns the weighted sum or mean of the components that count, after gates and clip.

    Worked: weights 0.9 and 0.1 with values 0.5 and 1 make 0.45 + 0.1 = 0.55; a closed gate makes min(0, 0.55) = 0.
    """
    counting = [one for one in reward.components if one.counts]
    failed = [one for one in counting if grades[one.name].state is ComponentState.FAILED]
    fatal = [one for one in failed if reward.missing == "exclude" or (reward.missing == "renormalise" and one.gate)]
    if fatal:
        return Total(None, _explained(fatal, grades))
    values = _values(counting, grades, zero=reward.missing == "zero")
    weighted = [one for one in counting if one.weight]
    if not any(one.name in values for one in weighted):
        return Total(None, _explained(weighted, grades))
    # Absolute weights: beside a lost reward, a penalty grows and stays a penalty.
    counted = sum(abs(one.weight) for one in weighted if one.name in values)
    lost = sum(abs(one.weight) for one in failed if one.name not in values)
    factor = (1.0 if reward.total == "weighted_mean" else counted + lost) / counted
    contributions = {one.name: one.weight * values[one.name] * factor for one in weighted if one.name in values}
    value = _bounded(reward, values, sum(contributions.values()))
    if not is_reward(value):
        return Total(None, f"the total {value:g} is no reward: lower the weights")
    return Total(value, None, contributions)


def _values(components: list[Component], grades: Mapping[str, Grade], *, zero: bool) -> dict[str, float]:
    """The values that count, with 0 in the place of those that failed if `zero` says so."""
    found = {one.name: grades[one.name] for one in components}
    values = {name: got.value for name, got in found.items() if got.value is not None}
    return values | {name: 0.0 for name, got in found.items() if zero and got.state is ComponentState.FAILED}


def _bounded(reward: Reward, values: Mapping[str, float], value: float) -> float:
    """The total after gates, then clip: a closed gate never raises it."""
    gates = [(values[one.name], one.gate) for one in reward.components if one.gate and one.name in values]
    if not all(reaches(found, gate.at_least) for found, gate in gates):
        value = min(0.0, value)
    if reward.clip is None:
        return value
    smallest, largest = reward.clip
    return min(max(value, smallest), largest)


def _explained(components: list[Component], grades: Mapping[str, Grade]) -> str:
    return "; ".join(f"{one.name}: {grades[one.name].explanation}" for one in components)
