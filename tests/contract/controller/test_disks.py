"""A disk that is nearly full: each run that has not ended has the alarm, once for one disk."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from leyden.libs.contracts.api.alarms import Alarm
from leyden.libs.contracts.api.waiting import Volume
from leyden.libs.service.volumes import Volumes
from leyden.libs.store import tables
from leyden.libs.store.alarms.disks import of_disks
from leyden.libs.store.alarms.events import due_events
from leyden.libs.store.alarms.stored import lasting_alarms
from leyden.libs.store.database import Database
from leyden.libs.store.read.waiting import folders_written
from leyden.services.controller.upkeep import alarms as judging
from leyden.services.controller.upkeep.alarms import judge_all
from tests.support import builders

Resize = Callable[[str], None]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Path, Resize]]:
    """A disk of 16 MiB, and a function that changes its size."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options: str) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)

    mount("size=16m")
    try:
        yield folder, lambda size: mount(f"remount,size={size}")
    finally:
        subprocess.run(["umount", folder], check=True)


async def judged(database: Database, run: tables.Run) -> list[Alarm]:
    """The alarms about disks that a round of the controller leaves with the run."""
    async with database.read() as session:
        folders = await folders_written(session)
    await judge_all(database, await Volumes().measure(*folders), with_events=True)
    async with database.read() as session:
        found = (await lasting_alarms(session, [run.id]))[run.id]
    return [one for one in found if one.name == "disk_low"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a disk")
async def test_a_small_disk_raises_the_alarm_of_active_runs_until_it_has_room(
    database: Database, disk: tuple[Path, Resize], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "QUIET_SECONDS", 0.0)
    folder, resize = disk
    ended, run = await builders.add_run(database), await builders.add_run(database)
    await builders.end_run(database, ended)
    await builders.add_policy_version(database, run, 0, path=str(folder))
    assert await judged(database, run) == []
    await builders.add_policy_version(database, run, 1, path=str(folder))
    [alarm] = await judged(database, run)
    assert (alarm.subject, alarm.severity) == ("versions", "warning")
    assert alarm.reason == "the disk of versions and checkpoints has 0.0 GiB free of 0.0 GiB, less than 5.0 GiB"
    assert alarm.evidence["free_bytes"] == 16 * 2**20
    assert alarm.evidence["folder"] == str(folder)
    assert await judged(database, ended) == []

    # A folder that is gone tells nothing, and the alarm lasts.
    await builders.add_policy_version(database, run, 2, path=str(folder / "gone"))
    assert [one.number for one in await judged(database, run)] == [alarm.number]
    await builders.add_policy_version(database, run, 3, path=str(folder))
    resize("6g")
    assert await judged(database, run) == []
    async with database.read() as session:
        told = [(one.run_id, one.body["event"]) for one in await due_events(session) if one.body["alarm"]]
    assert told == [(run.id, "alarm"), (run.id, "alarm_ended")]


def volume(name: str, free_bytes: int | None, same_disk_as: str | None = None) -> Volume:
    total, is_low = (None, None) if free_bytes is None else (2**40, free_bytes < 5 * 2**30)
    return Volume.model_validate({
        "name": name, "path": None, "free_bytes": free_bytes, "total_bytes": total, "nearly_full": is_low,
        "same_disk_as": same_disk_as,
    })  # fmt: skip


def test_one_disk_warns_once_and_keeps_its_subject() -> None:
    alone = [volume("versions", None), volume("database", 2**30)]
    shared = [volume("versions", 2**30), volume("database", 2**30, "versions")]
    apart = [volume("versions", 2**30), volume("database", 2**30)]
    roomy = [volume("versions", 5 * 2**30), volume("database", None)]
    assert [[one.subject for one in of_disks(disks)] for disks in (alone, shared, apart, roomy)] == [
        ["database"], ["database"], ["versions", "database"], [],
    ]  # fmt: skip
    [found] = of_disks(shared)
    assert found.reason.startswith("the disk of versions and checkpoints and the database has 1.0 GiB free of 1024.0")
