"""The tasks of a run: how often each was tried, and what the versions earned on it."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from leyden.libs.contracts.api.body import Body, Page

TaskVerdict = Literal["solved", "unsolved", "mixed"]
"""All rollouts with a reward earned at least 1, none did, or some did."""


class VersionOnTask(Body):
    """The rollouts of one policy version on a task."""

    version: int
    """The version at their admission."""
    rollouts: int
    """Those with a reward; greedy ones are left out, as in all means."""
    reward_mean: float | None
    """Null where none has a reward."""


class TaskFailure(Body):
    """A rollout on the task that agent or platform failed."""

    rollout_id: str
    reason: str | None
    finished_at: datetime | None


class RunTask(Body):
    """A task with the rollouts of one run on it."""

    dataset_id: str
    number: int
    """Position in the dataset, from 0."""
    text: str | None
    """The beginning of the task as JSON; null where the dataset has no such task any more."""
    group_id: str
    """The newest group."""
    groups: int
    rollouts: int
    attempts: int
    """Executions of the rollouts, those that failed and were repeated included."""
    rewarded: int
    """Rollouts with a reward; greedy ones are left out."""
    reward_mean: float | None
    """Null where none has a reward."""
    verdict: TaskVerdict | None
    """Null while no rollout has a reward: that is unknown, not unsolved."""
    versions: list[VersionOnTask]
    """In the order of the versions."""
    last_failure: TaskFailure | None


class RunTaskPage(Page[RunTask], use_attribute_docstrings=True):
    """A page of tasks."""

    verdicts: dict[str, int] | None = None
    """Tasks by verdict, `unknown` for those without one, whatever the filter says; on the first page alone."""
