"""Several runs beside each other: documents, series, evaluations, and the tasks that one won over another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from leyden.libs.contracts.api.comparison import Comparison, Difference, TaskComparison, whole_evaluations
from leyden.libs.contracts.api.runs import Evaluation
from leyden.libs.contracts.overlay import document_differences
from leyden.libs.store.database import ReadSession
from leyden.libs.store.read import results, runs
from leyden.libs.store.read.best import measurements
from leyden.libs.store.read.intervals import student_95

EVALUATIONS = 1000


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


async def _tasks(session: ReadSession, evaluations: Sequence[Sequence[Evaluation]]) -> list[TaskComparison]:
    pairs = [pair for other in evaluations[1:] if (pair := _last_pair(evaluations[0], other)) is not None]
    measured = await measurements(session, {one.id for pair in pairs for one in pair})
    means = {name: one.means for name, one in measured.items()}
    made = [_compared(first, other, means) for first, other in pairs]
    return [one for one in made if one is not None]


def _last_pair(first: Sequence[Evaluation], other: Sequence[Evaluation]) -> tuple[Evaluation, Evaluation] | None:
    """The evaluation of the other run's newest version on a dataset of the first one, and that of the first one's on
    it, both whole."""
    newest = {one.dataset_id: one for one in whole_evaluations(first)}
    shared = [one for one in whole_evaluations(other) if one.dataset_id in newest]
    return (newest[shared[-1].dataset_id], shared[-1]) if shared else None


def _compared(first: Evaluation, other: Evaluation, means: Mapping[str, Mapping[int, float]]) -> TaskComparison | None:
    both = means[first.id].keys() & means[other.id].keys()
    gains = [means[other.id][task] - means[first.id][task] for task in sorted(both)]
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
        won=sum(gain > 0 for gain in gains),
        lost=sum(gain < 0 for gain in gains),
        same=sum(gain == 0 for gain in gains),
        difference=fmean(gains),
        **interval,
    )
