"""Several runs beside each other: documents, series, evaluations, and the tasks that one won over another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from sqlalchemy import text

from leyden.libs.contracts.api.comparison import (
    Comparison,
    Difference,
    RunCurve,
    TaskChange,
    TaskComparison,
    whole_evaluations,
)
from leyden.libs.contracts.api.runs import Evaluation
from leyden.libs.contracts.overlay import document_differences
from leyden.libs.contracts.rewards import gain
from leyden.libs.store.database import ReadSession
from leyden.libs.store.read import results, runs
from leyden.libs.store.read.best import BestVersion, measured_versions, measurements
from leyden.libs.store.read.intervals import student_95
from leyden.libs.store.read.tasks import task_texts
from leyden.libs.store.rewards import step_mean

EVALUATIONS = 1000
POINTS = 40
"""The most points of a curve in a list."""
MOST_CHANGES = 10
"""Tasks named of those that rose, and of those that fell."""

# Evenly: each step whose share of the way differs from that of the step before.
_CURVES = text(f"""
    WITH numbered AS (
        SELECT run_id, number, row_number() OVER run - 1 AS place, count(*) OVER (PARTITION BY run_id) - 1 AS last
        FROM steps WHERE run_id = ANY(:runs) WINDOW run AS (PARTITION BY run_id ORDER BY number)
    ), chosen AS (
        SELECT run_id, number FROM numbered
        WHERE last < :points OR place = 0 OR place * (:points - 1) / last > (place - 1) * (:points - 1) / last
    )
    SELECT run_id, number, {step_mean("chosen.run_id", "chosen.number")} AS reward
    FROM chosen ORDER BY run_id, number
""")  # noqa: S608  # constants alone


_ROLLOUTS = text("""
    SELECT DISTINCT ON (groups.evaluation_id, groups.task_number) groups.evaluation_id, groups.task_number, rollouts.id
    FROM groups JOIN rollouts ON rollouts.group_id = groups.id
    WHERE groups.evaluation_id = ANY(:evaluations) AND groups.task_number = ANY(:tasks)
        AND rollouts.state = 'finished' AND rollouts.rerolls_of IS NULL
    ORDER BY groups.evaluation_id, groups.task_number, rollouts.sibling, rollouts.id
""")


async def compare_runs(session: ReadSession, run_ids: Sequence[str], names: Sequence[str]) -> Comparison:
    """The runs in this order.

    Args: names: the wanted series, at least one
    Raises: UnknownRun
    """
    found = [await runs.get_run(session, run_id) for run_id in run_ids]
    documents = [
        {} if one.config is None else one.config.model_dump(mode="json", by_alias=True, exclude={"name"})
        for one in found
    ]
    pages = [await results.list_evaluations(session, run_id, cursor=None, limit=EVALUATIONS) for run_id in run_ids]
    evaluations = [page.items for page in pages]
    return Comparison(
        runs=found,
        differences=[Difference(path=path, values=values) for path, values in document_differences(documents).items()],
        metrics=[await results.get_metrics(session, run_id, names) for run_id in run_ids],
        evaluations=evaluations,
        tasks=await _tasks(session, evaluations),
    )


async def run_curves(session: ReadSession, run_ids: Sequence[str]) -> list[RunCurve]:
    """The runs in this order, each once; ids that no run has are left out."""
    points: dict[str, list[tuple[int, float | None]]] = {run_id: [] for run_id in run_ids}
    for row in await session.execute(_CURVES, {"runs": list(run_ids), "points": POINTS}):
        points[row.run_id].append((row.number, row.reward))
    measured = await measured_versions(session, run_ids)
    return [_curve(run_id, of_run, *measured[run_id]) for run_id, of_run in points.items() if run_id in measured]


def _curve(
    run_id: str, points: list[tuple[int, float | None]], best: BestVersion, held_out: list[tuple[int, float]]
) -> RunCurve:
    return RunCurve(
        run_id=run_id,
        points=points,
        held_out=held_out,
        best_version=best.version,
        best_version_reason=best.reason,
        best_reward=best.reward,
        best_reward_of=best.reward_of,
    )


async def _tasks(session: ReadSession, evaluations: Sequence[Sequence[Evaluation]]) -> list[TaskComparison]:
    pairs = [pair for other in evaluations[1:] if (pair := _last_pair(evaluations[0], other)) is not None]
    measured = await measurements(session, {one.id for pair in pairs for one in pair}, beside=True)
    means = {name: one.means for name, one in measured.items()}
    made = [_compared(first, other, means) for first, other in pairs]
    return [await _with_changes(session, one, means) for one in made if one is not None]


async def _with_changes(
    session: ReadSession, one: TaskComparison, means: Mapping[str, Mapping[int, float]]
) -> TaskComparison:
    """The comparison with the tasks that rose and fell most."""
    before, after = (means[evaluation] for evaluation in one.evaluation_ids)
    losses = sorted((gain(after[task], before[task]), task) for task in before.keys() & after.keys())
    risen = [task for loss, task in losses if loss < 0][:MOST_CHANGES]
    fallen = [task for loss, task in reversed(losses) if loss > 0][:MOST_CHANGES]
    asked = {"evaluations": list(one.evaluation_ids), "tasks": risen + fallen}
    rollouts = {(row.evaluation_id, row.task_number): row.id for row in await session.execute(_ROLLOUTS, asked)}
    texts = await task_texts(session, [(one.dataset_id, task) for task in risen + fallen])
    first, other = one.evaluation_ids
    changes = [
        TaskChange(
            number=task,
            text=texts.get((one.dataset_id, task)),
            rewards=(before[task], after[task]),
            rollout_ids=(rollouts.get((first, task)), rollouts.get((other, task))),
        )
        for task in risen + fallen
    ]
    return one.model_copy(update={"changes": changes})


def _last_pair(first: Sequence[Evaluation], other: Sequence[Evaluation]) -> tuple[Evaluation, Evaluation] | None:
    """The evaluation of the other run's newest version on a dataset of the first one, and that of the first one's on
    it, both whole."""
    newest = {one.dataset_id: one for one in whole_evaluations(first)}
    shared = [one for one in whole_evaluations(other) if one.dataset_id in newest]
    return (newest[shared[-1].dataset_id], shared[-1]) if shared else None


def _compared(first: Evaluation, other: Evaluation, means: Mapping[str, Mapping[int, float]]) -> TaskComparison | None:
    both = means[first.id].keys() & means[other.id].keys()
    gains = [gain(means[first.id][task], means[other.id][task]) for task in sorted(both)]
    if not gains:
        return None
    interval: dict[str, Any] = {"low": None, "high": None}
    if len(gains) > 1:
        half = student_95(len(gains) - 1) * stdev(gains) / math.sqrt(len(gains))
        interval = {"low": fmean(gains) - half, "high": fmean(gains) + half}
    return TaskComparison(
        run_id=other.run_id,
        dataset_id=first.dataset_id,
        evaluation_ids=(first.id, other.id),
        won=sum(one > 0 for one in gains),
        lost=sum(one < 0 for one in gains),
        same=sum(one == 0 for one in gains),
        difference=fmean(gains),
        changes=[],
        **interval,
    )
