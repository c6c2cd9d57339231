"""The total of a rollout's components: the one place that computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from leyden.libs.contracts.config import Reward
from leyden.libs.contracts.rewards import is_reward
from leyden.libs.contracts.states import ComponentState
from leyden.libs.grading.grade import Grade


@dataclass(frozen=True)
class Total:
    """A rollout's reward; null where it has none, for the `reason`."""

    value: float | None
    reason: str | None = None


def total(reward: Reward, grades: Mapping[str, Grade]) -> Total:
    """Returns the weighted sum of the scored components. A component that is not applicable adds nothing."""
    weights = {one.name: one.weight for one in reward.components if one.weight}
    values = {name: grades[name].value for name in weights}
    scored = {name: weights[name] * value for name, value in values.items() if value is not None}
    failed = [name for name in weights if grades[name].state is ComponentState.FAILED]
    if failed and reward.missing == "exclude":
        return Total(None, "; ".join(f"{name}: {grades[name].explanation}" for name in failed))
    if not scored and not (failed and reward.missing == "zero"):
        return Total(None, "; ".join(f"{name}: {grades[name].explanation}" for name in weights))
    value = sum(scored.values())
    if failed and reward.missing == "renormalise":
        counted = sum(weights[name] for name in scored)
        lost = sum(weights[name] for name in failed)
        if not counted:
            return Total(None, "the weights of the graded components add up to 0")
        value *= (counted + lost) / counted
    if not is_reward(value):
        return Total(None, f"the total {value:g} is no reward: lower the weights")
    return Total(value)
