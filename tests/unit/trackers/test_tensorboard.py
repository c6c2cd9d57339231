"""Event files: whole or torn, in order or late, a point is there once for every reader."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from leyden.libs.trackers.destination import Point, Subject, TrackerError
from leyden.libs.trackers.tensorboard import TensorBoard
from tests.support.event_files import shown

SUBJECT = Subject("run-1", "first: run/..")
FOLDER = "first_run_.run-1"


def points(*steps: int, names: tuple[str, ...] = ("loss", "reward_mean")) -> list[Point]:
    return [Point(name, step, step / 4, 1e9 + step) for step in steps for name in names]


def write(folder: Path, wanted: list[Point]) -> None:
    """As a process that starts, writes what is missing, and ends."""
    log = TensorBoard(folder).open(SUBJECT)
    log.write([point for point in wanted if point.key not in log.written])
    log.close(None)


def test_a_file_that_is_torn_at_any_byte_loses_and_doubles_no_point(tmp_path: Path) -> None:
    write(tmp_path / "whole", points(1, 2))
    [file] = (tmp_path / "whole").rglob("*tfevents*")
    content = file.read_bytes()
    expected = [(point.name, point.step, point.value) for point in points(1, 2, 3)]
    for length in range(len(content) + 1):
        torn = tmp_path / str(length) / FOLDER / file.name
        torn.parent.mkdir(parents=True)
        torn.write_bytes(content[:length])
        write(tmp_path / str(length), points(1, 2, 3))
        assert shown(torn.parent) == expected, length


def test_a_record_with_a_wrong_checksum_ends_its_file(tmp_path: Path) -> None:
    write(tmp_path, points(1, 2))
    [file] = tmp_path.rglob("*tfevents*")
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    log = TensorBoard(tmp_path).open(SUBJECT)
    log.close(None)
    assert log.written == {point.key for point in points(1)}


def test_a_late_point_removes_no_later_one(tmp_path: Path) -> None:
    evaluations = ("evaluation.held_out.reward_mean",)
    write(tmp_path, [*points(1, 2, 3), *points(2, names=evaluations)])
    write(tmp_path, [*points(1, names=evaluations), *points(4)])
    write(tmp_path, points(0, 1, 2, 3, names=evaluations))
    folder = tmp_path / FOLDER
    found = {path.name: shown(path) for path in (folder, folder / "late-1", folder / "late-2")}
    steps = {name: [step for tag, step, _ in of_lane if tag in evaluations] for name, of_lane in found.items()}
    assert steps == {FOLDER: [2, 3], "late-1": [1], "late-2": [0]}
    assert Counter(tag for tag, *_ in found[FOLDER]) == {"loss": 4, "reward_mean": 4, evaluations[0]: 2}


def test_a_folder_has_one_writer_and_lies_below_the_given_one(tmp_path: Path) -> None:
    tracker = TensorBoard(tmp_path)
    log = tracker.open(SUBJECT)
    with pytest.raises(TrackerError, match="another process"):
        tracker.open(SUBJECT)
    log.close(None)
    tracker.open(SUBJECT).close(None)
    tracker.open(Subject("run-2", "é" * 200)).close("completed")
    assert sorted(path.name for path in tmp_path.iterdir()) == [FOLDER, f"{'é' * 40}.run-2"]
