"""Disk space of folders: a disk that hangs holds one thread and no answer."""

from __future__ import annotations

import asyncio
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
    monkeypatch.setattr(volumes, "PATIENCE_SECONDS", 0.05)
    asked, back = list[str](), threading.Event()

    def read(path: str) -> Disk | OSError:
        asked.append(path)
        if path == "/hangs":
            back.wait()
        return read_disk(str(tmp_path))

    disks = Volumes(read)
    for _ in range(3):
        versions, database = await disks.measure("/hangs", "/answers")
        assert (versions.free_bytes, versions.nearly_full, database.nearly_full is None) == (None, None, False)
        assert versions.reason == "the API cannot read the folder /hangs: it did not answer within 0.05 s"
    assert asked.count("/hangs") == 1
    assert asked.count("/answers") == 3
    back.set()
    async with asyncio.timeout(30):
        while (await disks.measure("/hangs", None))[0].free_bytes is None:
            pass
