"""The points of a run: known numbers under the names of the API's series."""

from __future__ import annotations

from datetime import UTC, datetime

from leyden.libs.contracts.api.runs import Evaluation, EvaluationResults, Fact, Metrics, Series, Statistic
from leyden.libs.trackers.destination import Point
from leyden.libs.trackers.points import evaluation_points, step_points

MOMENT = datetime(2026, 1, 1, tzinfo=UTC)


def mean(value: float) -> Statistic:
    return Statistic(count=4, tasks=2, mean=value, low=None, high=None)


def evaluation(*, complete: bool = True, version: int | None = 7, cancelled: int = 0) -> Evaluation:
    facts = [
        Fact(name="success", kind="share", statistic=mean(0.5), total=4),
        Fact(name="first_tool", kind="text", counts={"memory": 4}, total=4),
    ]
    results = EvaluationResults(
        rollouts={"cancelled": cancelled}, complete=complete, reward=mean(0.25), counted_tasks=2, facts=facts
    )
    return Evaluation(
        id="e",
        run_id="r",
        number=1,
        dataset_id="d",
        policy_version=version,
        measured_version=version,
        rollouts_per_task=2,
        max_tasks=None,
        tasks=2,
        created_at=MOMENT,
        results=results,
    )


def test_each_value_of_a_series_is_a_point_at_its_step() -> None:
    series = [Series(name="loss", points=[(1, 2.0, 0.0), (3, 9.5, -0.5)]), Series(name="value_loss", points=[])]
    found = list(step_points(Metrics(run_id="r", names=[], series=series), MOMENT))
    begin = MOMENT.timestamp()
    assert found == [Point("loss", 1, 0.0, begin + 2), Point("loss", 3, -0.5, begin + 9.5)]


def test_a_complete_evaluation_gives_its_means_at_the_measured_version() -> None:
    time = MOMENT.timestamp()
    assert list(evaluation_points(evaluation(), "held out")) == [
        Point("evaluation.held out.reward_mean", 7, 0.25, time),
        Point("evaluation.held out.fact.success", 7, 0.5, time),
    ]
    assert list(evaluation_points(evaluation(complete=False), "d")) == []
    assert list(evaluation_points(evaluation(version=None), "d")) == []
    assert list(evaluation_points(evaluation(cancelled=1), "d")) == []
