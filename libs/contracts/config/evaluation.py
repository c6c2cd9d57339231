"""Rollouts on held-out tasks, and the versions that they measure."""

from __future__ import annotations

from pydantic import Field

from leyden.libs.contracts.config.document import Document, Word

MAX_PLANNED_EVALUATIONS = 1000


class EvaluationPlan(Document):
    """Rollouts on held-out tasks, never trained."""

    dataset: Word
    """Id or name of the dataset."""
    rollouts_per_task: int = Field(default=1, ge=1, le=1024)
    max_tasks: int | None = Field(default=None, ge=1, le=2**31 - 1)
    at_start: bool = True
    """Evaluate version 0 before the first step."""
    every: int | None = Field(default=None, ge=1, le=1_000_000)
    """Evaluate the version of every n-th step; training waits for it. Null: at start and end alone."""
    at_end: bool = True
    """Evaluate the last version after the last step."""

    def planned_versions(self, steps: int) -> list[int | None]:
        """The versions to measure, in order; None is the last one.

        >>> EvaluationPlan(dataset="held-out", every=10).planned_versions(steps=30)
        [0, 10, 20, None]
        """
        end = steps if self.at_end else steps + 1
        between = [] if self.every is None else list(range(self.every, end, self.every))
        return [0] * self.at_start + between + [None] * self.at_end
