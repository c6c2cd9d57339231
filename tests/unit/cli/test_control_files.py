"""Requests to a supervisor: files that it pops, and progress that the command follows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from leyden.libs.cli import control_files
from leyden.libs.cli.control_files import Progress


def always() -> bool:
    return True


def test_a_request_is_popped_once_and_its_progress_followed_to_its_end(tmp_path: Path) -> None:
    control_files.clear(tmp_path)
    assert control_files.pop(tmp_path) is None
    request = control_files.submit(tmp_path, ["api", "credit"])
    assert [control_files.pop(tmp_path), control_files.pop(tmp_path)] == [request, None]
    stages = [
        Progress(state="starting", service="api"),
        Progress(state="failed", service="api", detail="it ended"),
    ]
    followed: list[Progress] = []
    following = threading.Thread(target=lambda: followed.extend(control_files.follow(tmp_path, request, always)))
    following.start()
    for stage in [*stages, Progress(state="ended")]:
        control_files.report(tmp_path, request, stage)
    following.join(60)
    assert followed == stages
    assert list((tmp_path / "requests").iterdir()) == []


def test_the_oldest_request_is_popped_first_and_an_invalid_one_never(tmp_path: Path) -> None:
    control_files.clear(tmp_path)
    (tmp_path / "requests" / "0.json").write_text('{"launch": "everything"}')
    first, second = control_files.submit(tmp_path, ["api"]), control_files.submit(tmp_path, ["credit"])
    assert [control_files.pop(tmp_path), control_files.pop(tmp_path), control_files.pop(tmp_path)] == [
        first,
        second,
        None,
    ]


@pytest.mark.parametrize("end", [lambda home: None, control_files.clear], ids=["supervisor gone", "supervisor new"])
def test_following_ends_with_the_supervisor(tmp_path: Path, end: Callable[[Path], None]) -> None:
    control_files.clear(tmp_path)
    request = control_files.submit(tmp_path, ["api"])
    following = control_files.follow(tmp_path, request, lambda: end is control_files.clear)
    control_files.report(tmp_path, request, Progress(state="starting", service="api"))
    assert next(following).state == "starting"
    end(tmp_path)
    with pytest.raises(EOFError):
        next(following)
