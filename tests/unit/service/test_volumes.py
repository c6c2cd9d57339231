"""Disk space of folders: a disk that hangs holds one thread and no answer."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from leyden.libs.service import volumes
from leyden.libs.service.volumes import Disk, Volumes, read_disk


async def test_folders_of_one_disk_say_so_and_an_absent_one_is_unknown(tmp_path: Path) -> None:
    database = tmp_path / "database"
    database.mkdir()
    first, second = await Volumes().measure(str(tmp_path), str(database))
    assert (first.same_disk_as, second.same_disk_as) == (None, "versions")
    assert first.total_bytes == second.total_bytes is not None
    first, second = await Volumes().measure(str(tmp_path / "gone"), None)
    assert [one.nearly_full for one in (first, second)] == [None, None]
    assert second.same_disk_as is None


async def test_a_disk_that_hangs_is_asked_once_and_unknown_until_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, back = list[str](), threading.Event()

    def read(path: str) -> Disk | OSError:
        asked.append(path)
        if path.startswith("/hangs"):
            back.wait()
        return read_disk(str(tmp_path))

    disks = Volumes(read)
    monkeypatch.setattr(volumes, "PATIENCE_SECONDS", 0.05)
    for _ in range(3):
        (versions, _) = await disks.measure("/hangs", None)
        assert (versions.free_bytes, versions.nearly_full) == (None, None)
        assert versions.reason == "the API cannot read the folder /hangs: it did not answer within 0.05 s"
    for number in range(10):
        await disks.measure(f"/hangs/{number}", None)
    assert asked[-2:] == ["/hangs/0", "/hangs/1"]
    monkeypatch.setattr(volumes, "PATIENCE_SECONDS", 30.0)
    for _ in range(3):
        (_, database) = await disks.measure("/hangs/9", "/answers")
        assert database.nearly_full is not None
    assert asked.count("/hangs") == 1
    assert asked.count("/answers") == 3
    back.set()
    assert (await disks.measure("/hangs", None))[0].free_bytes is not None


async def test_a_defect_in_reading_a_disk_ends_the_wait_for_it() -> None:
    def read(_: str) -> Disk | OSError:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await Volumes(read).measure("/", None)
