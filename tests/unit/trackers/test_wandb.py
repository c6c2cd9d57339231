"""W&B's offline files have each point once, also after kills, written and read by the real library."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from leyden.libs.trackers.destination import Point, Subject, TrackerError

pytest.importorskip("wandb", reason="pip install 'leyden[wandb]'")
SUBJECT = Subject("run-1", "first run")
NAMES = ("loss", "tool.find:flight")

KILLED = """
import os, signal, sys
from leyden.libs.trackers.destination import Point, Subject
from leyden.libs.trackers.wandb import WandB

log = WandB("leyden").open(Subject("run-1", "first run"))
points = [Point(name, step, step / 4, 1e9 + step) for step in (1, 2, 3) for name in ("loss", "tool.find:flight")]
log.write(points[:4])
log._await = lambda wanted: os.kill(os.getpid(), signal.SIGKILL)
log.write(points[4:])
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    return tmp_path


def points(*steps: int) -> list[Point]:
    return [Point(name, step, step / 4, 1e9 + step) for step in steps for name in NAMES]


def shown(folder: Path) -> Counter[tuple[str, int]]:
    """The points of all files of the run, each as often as it is there."""
    from leyden.libs.trackers.wandb import rows

    found = [row for path in sorted(folder.rglob("run-run-1.wandb")) for row in rows(path)]
    return Counter((name, row["step"]) for row in found for name in NAMES if name in row)


def test_a_killed_writer_loses_and_doubles_no_point_and_late_points_are_kept(folder: Path) -> None:
    from leyden.libs.trackers.wandb import WandB, rows

    assert subprocess.run([sys.executable, "-c", KILLED], check=False).returncode == -signal.SIGKILL
    log = WandB("leyden").open(SUBJECT)
    assert log.written >= {point.key for point in points(1, 2)}
    with pytest.raises(TrackerError, match="another process writes run-1"):
        WandB("leyden").open(SUBJECT)
    late = Point("evaluation.d.reward_mean", 2, 0.5, 1e9)
    log.write([point for point in [*points(1, 2, 3, 4), late] if point.key not in log.written])
    log.close("completed")
    log = WandB("leyden").open(SUBJECT)
    assert log.written == {point.key for point in [*points(1, 2, 3, 4), late]}
    log.close(None)
    assert shown(folder) == dict.fromkeys((point.key for point in points(1, 2, 3, 4)), 1)
    files = sorted(folder.rglob("run-run-1.wandb"))
    assert len(files) == 2
    assert [row["loss"] for path in files for row in rows(path) if "loss" in row] == [0.25, 0.5, 0.75, 1.0]


def test_a_torn_file_is_read_up_to_its_last_whole_row(folder: Path) -> None:
    from leyden.libs.trackers.wandb import WandB, rows

    log = WandB("leyden").open(SUBJECT)
    # More than a block of 32 KB, so that a record is in pieces.
    log.write([Point(f"fact.long{step}.{number:0100}", step, 1.0, 1e9) for step in (1, 2) for number in range(400)])
    log.close(None)
    [path] = folder.rglob("run-run-1.wandb")
    whole = [row["step"] for row in rows(path)]
    assert whole == [1, 2]
    content = path.read_bytes()
    os.truncate(path, content.index(b"fact.long2."))
    assert [row["step"] for row in rows(path)] == [1]
    place = content.index(b"fact.long1.")
    path.write_bytes(content[:place] + b"\0" + content[place + 1 :])
    assert [row["step"] for row in rows(path)] == []
    again = WandB("leyden").open(SUBJECT)
    assert again.written == set()
    again.close(None)


def test_subjects_with_one_title_are_runs_of_their_own_and_bad_projects_are_refused() -> None:
    from leyden.libs.trackers.wandb import WandB

    first, other = WandB("leyden").open(SUBJECT), WandB("leyden").open(Subject("run-2", SUBJECT.title))
    first.write(points(1))
    assert (len(first.written), len(other.written)) == (2, 0)
    first.close("failed")
    other.close(None)
    for project in ("", "a/b", "a b"):
        with pytest.raises(TrackerError, match="wandb:PROJECT"):
            WandB(project)
