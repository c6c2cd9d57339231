"""Several runs beside each other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from leyden.libs.contracts.api.body import Body
from leyden.libs.contracts.api.runs import Evaluation, Metrics, Run


class Difference(Body):
    """A field in which the documents of the runs differ."""

    path: str
    """Such as `optimizer.learning_rate`; an item of a list has its number, from 0."""
    values: list[str | None]
    """One of each run, as JSON; null where its document has no such field."""


class TaskChange(Body):
    """A task whose mean reward differs between the evaluations of two runs."""

    number: int
    """Position in the dataset, from 0."""
    text: str | None
    """The first 300 characters of its row, as JSON; null where its dataset was deleted."""
    rewards: tuple[float, float]
    """The mean rewards in the first run and in the other one."""
    rollout_ids: tuple[str | None, str | None]
    """One finished rollout in each; null where none is stored."""


class TaskComparison(Body):
    """The tasks that the first run and another one were both evaluated on, by the whole evaluation of the newest
    version of each on one dataset."""

    run_id: str
    """The other run."""
    dataset_id: str
    evaluation_ids: tuple[str, str]
    """The first run's, and the other one's."""
    won: int
    """Tasks whose mean reward is higher in the other run."""
    lost: int
    same: int
    difference: float
    """The other run's mean over these tasks minus the first one's, each task weighing the same."""
    low: float | None
    """95 % interval of the difference by Student over tasks; null, as `high`, for one task."""
    high: float | None
    changes: list[TaskChange]
    """The ten tasks that rose most in the other run, the largest gain first; then the ten that fell most, the largest
    loss first."""


class Comparison(Body):
    """Runs beside each other, in the order asked for."""

    runs: list[Run]
    differences: list[Difference]
    """By path, names of the runs left out."""
    metrics: list[Metrics]
    """The series asked for, of each run."""
    evaluations: list[list[Evaluation]]
    """The first 1,000 evaluations of each run."""
    tasks: list[TaskComparison]
    """One for each further run that was evaluated on a dataset of the first one."""


class RunCurve(Body):
    """The reward of one of several runs over its steps, and its best version, for lists."""

    run_id: str
    points: list[tuple[int, float | None]]
    """Steps with the mean reward of their groups: at most 40, evenly from the first to the newest. Null where no group
    of the step has a reward."""
    held_out: list[tuple[int, float]] = Field(default_factory=list)
    """Versions with the mean reward of their whole evaluations, on the tasks by which versions are compared."""
    best_version: int | None
    """As in the answer about one run."""
    best_version_reason: str | None
    best_reward: float | None
    """The mean reward of the best version; null without one."""
    best_reward_of: Literal["evaluations", "training"] | None
    """`evaluations`: on held-out tasks, each weighing the same; `training`: over its rollouts."""


def whole_evaluations(evaluations: Iterable[Evaluation]) -> list[Evaluation]:
    """Returns those of a run that have measured all tasks of its first one on their dataset, by version; one that lost
    more than half of its tasks is none."""
    evaluations = sorted(evaluations, key=lambda one: one.number)
    needed = {one.dataset_id: one.tasks for one in reversed(evaluations)}
    whole = [one for one in evaluations if one.tasks >= needed[one.dataset_id] and _is_whole(one)]
    return sorted(whole, key=lambda one: (one.measured_version or 0, one.number))


def _is_whole(evaluation: Evaluation) -> bool:
    results = evaluation.results
    return results.is_whole and results.reward is not None and 2 * results.counted_tasks >= evaluation.tasks
