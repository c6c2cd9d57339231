"""Orders to a supervisor: files that it takes, and progress that the command follows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from leyden.libs.cli import control_files
from leyden.libs.cli.control_files import Progress


def always() -> bool:
    return True


def test_an_order_is_taken_once_and_its_progress_followed_to_its_end(tmp_path: Path) -> None:
    control_files.clear(tmp_path)
    assert control_files.take(tmp_path) is None
    order = control_files.place(tmp_path, ["api", "credit"])
    assert [control_files.take(tmp_path), control_files.take(tmp_path)] == [order, None]
    stages = [
        Progress(state="starting", service="api"),
        Progress(state="failed", service="api", detail="it ended"),
    ]
    followed: list[Progress] = []
    following = threading.Thread(target=lambda: followed.extend(control_files.follow(tmp_path, order, always)))
    following.start()
    for stage in [*stages, Progress(state="ended")]:
        control_files.tell(tmp_path, order, stage)
    following.join(60)
    assert followed == stages
    assert list((tmp_path / "orders").iterdir()) == []


def test_the_oldest_order_comes_first_and_a_foreign_one_never(tmp_path: Path) -> None:
    control_files.clear(tmp_path)
    (tmp_path / "orders" / "0.json").write_text('{"launch": "everything"}')
    first, second = control_files.place(tmp_path, ["api"]), control_files.place(tmp_path, ["credit"])
    assert [control_files.take(tmp_path), control_files.take(tmp_path), control_files.take(tmp_path)] == [
        first,
        second,
        None,
    ]


@pytest.mark.parametrize("end", [lambda home: None, control_files.clear], ids=["supervisor gone", "supervisor new"])
def test_nobody_follows_a_supervisor_that_is_gone(tmp_path: Path, end: Callable[[Path], None]) -> None:
    control_files.clear(tmp_path)
    order = control_files.place(tmp_path, ["api"])
    following = control_files.follow(tmp_path, order, lambda: end is control_files.clear)
    control_files.tell(tmp_path, order, Progress(state="starting", service="api"))
    assert next(following).state == "starting"
    end(tmp_path)
    with pytest.raises(EOFError):
        next(following)
