"""Trackio has each point once, whoever wrote it, in the real library's database."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from leyden.libs.trackers.destination import Point, Subject, TrackerError

storage = pytest.importorskip("trackio.sqlite_storage", reason="pip install 'leyden[trackio]'")
SUBJECT = Subject("run-1", "first run")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "TRACKIO_DIR", tmp_path)


def points(*steps: int) -> list[Point]:
    return [Point(name, step, step / 4, 1e9 + step) for step in steps for name in ("loss", "tool.find:flight")]


def shown(subject: Subject) -> list[tuple[Any, ...]]:
    rows = storage.SQLiteStorage.get_logs("leyden", run_id=subject.id)
    return [(row.pop("step"), *sorted(row.items())) for row in rows]


def test_each_point_is_there_once_whatever_was_there_before() -> None:
    from leyden.libs.trackers.trackio import Trackio

    for steps in ((1, 2), (1, 2, 3), (1, 2, 3)):
        log = Trackio("leyden").open(SUBJECT)
        log.write([point for point in points(*steps) if point.key not in log.written])
        assert log.written == {point.key for point in points(*steps)}
        log.close("completed")
    assert shown(SUBJECT) == [
        (step, *sorted({name: step / 4, "timestamp": f"2001-09-09T01:46:4{step}+00:00"}.items()))
        for step in (1, 2, 3)
        for name in ("loss", "tool.find:flight")
    ]


def test_two_writers_and_an_older_point_double_nothing() -> None:
    from leyden.libs.trackers.trackio import Trackio

    first, second = (Trackio("leyden").open(SUBJECT) for _ in range(2))
    for log in (first, second):
        log.write(points(5, 6))
    first.write([Point("evaluation.d.reward_mean", 2, 0.5, 1e9)])
    again = Trackio("leyden").open(SUBJECT)
    assert again.written == {point.key for point in points(5, 6)} | {("evaluation.d.reward_mean", 2)}
    assert len(storage.SQLiteStorage.get_logs("leyden", run_id=SUBJECT.id)) == 5


def test_two_writers_who_found_different_points_missing_double_none() -> None:
    from leyden.libs.trackers.trackio import Trackio

    early, late = (Trackio("leyden").open(SUBJECT) for _ in range(2))
    early.write(points(5)[:1])
    late.write(points(5))
    rows = storage.SQLiteStorage.get_logs("leyden", run_id=SUBJECT.id)
    assert [row.keys() - {"step", "timestamp"} for row in rows] == [{"loss"}, {"tool.find:flight"}]


def test_subjects_with_one_title_are_runs_of_their_own() -> None:
    from leyden.libs.trackers.trackio import Trackio

    other = Subject("run-2", SUBJECT.title)
    Trackio("leyden").open(SUBJECT).write(points(1))
    assert Trackio("leyden").open(other).written == set()
    Trackio("leyden").open(other).write(points(1, 2))
    assert (len(shown(SUBJECT)), len(shown(other))) == (2, 4)


def test_a_project_that_trackio_reserves_is_refused() -> None:
    from leyden.libs.trackers.trackio import Trackio

    with pytest.raises(TrackerError, match="trackio:PROJECT"):
        Trackio("registry-a")
