"""The ledger of an attempt from the grades of its components."""

from __future__ import annotations

from collections.abc import Sequence

from leyden.libs.contracts.config import Reward
from leyden.libs.contracts.ledger import Ledger, NewComponent
from leyden.libs.grading.grade import storable
from leyden.libs.grading.pool import Graded
from leyden.libs.grading.total import total


def ledger(reward: Reward, graded: Sequence[Graded]) -> Ledger:
    """Returns the total and the rows of an attempt's grades, which are in the order of the components. Postgres and
    JSON take all texts.
    """
    grades = {one.name: found.grade for one, found in zip(reward.components, graded, strict=True)}
    found = total(reward, grades)
    rows = [
        NewComponent(
            component=one.name,
            state=str(got.grade.state),
            weight=one.weight,
            value=got.grade.value,
            contribution=found.contributions.get(one.name),
            extracted=None if got.grade.extracted is None else storable(got.grade.extracted),
            explanation=storable(got.grade.explanation),
            source=one.grader.type if one.grader else str(one.source),
            duration_seconds=got.seconds,
        )
        for one, got in zip(reward.components, graded, strict=True)
    ]
    return Ledger(found.value, None if found.reason is None else storable(found.reason), tuple(rows))
