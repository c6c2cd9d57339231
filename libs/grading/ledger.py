"""The ledger of an attempt: its total, and for each component the row that explains it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from leyden.libs.contracts.config import Reward
from leyden.libs.grading.pool import Graded
from leyden.libs.grading.total import total


class NewComponent(NamedTuple):
    """One row of `rollout_rewards` without its keys."""

    component: str
    state: str
    weight: float
    value: float | None
    contribution: float | None
    extracted: str | None
    explanation: str
    source: str
    duration_seconds: float


class Ledger(NamedTuple):
    """A total, or the reason why there is none, with all components in their order."""

    total: float | None
    reason: str | None
    components: tuple[NewComponent, ...]


def ledger(reward: Reward, graded: Sequence[Graded]) -> Ledger:
    """Returns the total and the rows of an attempt's grades, which are in the order of the components."""
    grades = {one.name: found.grade for one, found in zip(reward.components, graded, strict=True)}
    found = total(reward, grades)
    rows = [
        NewComponent(
            component=one.name,
            state=str(got.grade.state),
            weight=one.weight,
            value=got.grade.value,
            contribution=found.contributions.get(one.name),
            extracted=got.grade.extracted,
            explanation=got.grade.explanation,
            source=one.grader.type if one.grader else str(one.source),
            duration_seconds=got.seconds,
        )
        for one, got in zip(reward.components, graded, strict=True)
    ]
    return Ledger(found.value, found.reason, tuple(rows))
