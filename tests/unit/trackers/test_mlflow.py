"""MLflow has each point once, also when answers are lost and processes begin anew."""

from __future__ import annotations

import httpx
import pytest

from leyden.libs.trackers.destination import Point, Subject, TrackerError
from leyden.libs.trackers.mlflow import MLflow
from tests.fakes.mlflow import FakeMLflow

SUBJECT = Subject("run-1", "first run")
NAMES = ("loss", "tool.find:flight.calls")


def points(steps: int) -> list[Point]:
    return [Point(name, step, step / 4, 1e9 + step) for step in range(1, steps + 1) for name in NAMES]


def tracker(server: FakeMLflow) -> MLflow:
    return MLflow("http://mlflow:5000", transport=httpx.MockTransport(server))


def test_each_point_is_there_once_whatever_was_there_before() -> None:
    server = FakeMLflow()
    for steps in (2, 5, 5):
        log = tracker(server).open(SUBJECT)
        log.write([point for point in points(steps) if point.key not in log.written])
        assert log.written >= {point.key for point in points(steps)}
        log.close(None)
    assert sorted((name, step) for _, name, step, *_ in server.rows) == [
        (name, step) for name in ("loss", "tool.find_3a_flight.calls") for step in range(1, 6)
    ]
    assert server.batches == [4, 6]
    assert [run["info"]["status"] for run in server.runs.values()] == ["RUNNING"]
    tracker(server).open(SUBJECT).close("failed")
    assert [run["info"]["status"] for run in server.runs.values()] == ["FAILED"]


def test_a_lost_answer_doubles_no_point_and_parts_no_run() -> None:
    server = FakeMLflow()
    server.lost = {"runs/create", "runs/log-batch"}
    tracker(server).open(SUBJECT).write(points(3))
    assert len(server.runs) == 2 and server.batches == [6, 6]
    log = tracker(server).open(SUBJECT)
    log.write(points(4))
    assert len(server.rows) == 8
    assert len({run for run, *_ in server.rows}) == 1


def test_many_points_are_several_requests() -> None:
    server = FakeMLflow()
    tracker(server).open(SUBJECT).write(points(600))
    assert server.batches == [1000, 200] and len(server.rows) == 1200


def test_a_refusal_and_an_absent_server_are_told() -> None:
    refusing = httpx.MockTransport(lambda request: httpx.Response(401, text="no such user"))
    with pytest.raises(TrackerError, match="401 to experiments/get-by-name: no such user"):
        MLflow("http://mlflow:5000", transport=refusing).open(SUBJECT)
    absent = httpx.MockTransport(lambda request: httpx.Response(503))
    with pytest.raises(TrackerError, match="--to mlflow:URL"):
        MLflow("http://mlflow:5000", outage_seconds=0.0, transport=absent).open(SUBJECT)
