"""The points of a run, as every tracker gets them. Their names are those of the API's series.

An unknown value is no point: a series has none at that step.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from leyden.libs.contracts.api.runs import Evaluation, Metrics
from leyden.libs.trackers.destination import Point

LATE = frozenset({"swap_seconds_mean", "swap_seconds_max"})
"""Numbers that grow after their step: engines load its weights one by one, and some while the next step is made."""


def step_points(metrics: Metrics, started: datetime) -> Iterator[Point]:
    """The numbers of every step. Args: started: the beginning of the first step"""
    begin = started.timestamp()
    for series in metrics.series:
        for step, seconds, value in series.points:
            yield Point(series.name, step, value, begin + seconds)


def evaluation_points(evaluation: Evaluation, dataset: str) -> Iterator[Point]:
    """The means of a whole evaluation at the version that it measured; none before.

    Args: dataset: its name, which is a part of the points' names: evaluations on several datasets are several curves
    """
    results, version = evaluation.results, evaluation.measured_version
    if not results.is_whole or version is None:
        return
    time = evaluation.created_at.timestamp()
    means = [("reward_mean", results.reward), *((f"fact.{fact.name}", fact.statistic) for fact in results.facts)]
    for name, statistic in means:
        if statistic is not None:
            yield Point(f"evaluation.{dataset}.{name}", version, statistic.mean, time)
