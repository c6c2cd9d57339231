"""Free disk space of the folders that services write to, where this process's machine has them."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from leyden.libs.contracts.api.waiting import NEEDED_DISK_BYTES, Volume

PATIENCE_SECONDS = 2.0
MAX_LATE = 3
"""Folders of one name without an answer; no further one is asked meanwhile."""

NO_VERSION = "no run has trained a version whose files are there"
ELSEWHERE = "Postgres is on another machine, or tells its folder to none but administrators"


class Disk(NamedTuple):
    """A file system. `device`: its number on this machine."""

    free_bytes: int
    total_bytes: int
    device: int


def read_disk(path: str) -> Disk | OSError:
    """The file system of a folder; on a network disk that hangs, this hangs too."""
    try:
        found = shutil.disk_usage(path)
        return Disk(found.free, found.total, Path(path).stat().st_dev)
    except OSError as error:
        return error


class Volumes:
    """Measures the disks of versions and database, in a thread for each: one question at a time.

    A disk that hangs holds a thread for each folder, three at most, and no process waits for them to end. Its space is
    unknown meanwhile.

    Args: read: `read_disk`
    """

    def __init__(self, read: Callable[[str], Disk | OSError] = read_disk) -> None:
        self._read = read
        self._asked: dict[tuple[str, str], Future[Disk | OSError]] = {}

    async def measure(self, versions: str | None, database: str | None) -> list[Volume]:
        """The disks of versions and database, in this order, within two seconds.

        The database's folder stays unnamed: Postgres tells it to administrators alone.

        Args: versions, database: folders; None: not known
        """
        first, second = await asyncio.gather(self._ask("versions", versions), self._ask("database", database))
        is_same = isinstance(first, Disk) and isinstance(second, Disk) and first.device == second.device
        return [
            Volume(name="versions", path=versions, **_space(first, f"folder {versions}", NO_VERSION)),
            Volume(
                name="database",
                path=None,
                same_disk_as="versions" if is_same else None,
                **_space(second, "folder of Postgres", ELSEWHERE),
            ),
        ]

    async def _ask(self, name: str, path: str | None) -> Disk | OSError | None:
        """None: no folder. A question that has no answer yet is waited for, and no second one begins."""
        if path is None:
            return None
        # A folder of a moment ago may still hang.
        self._asked = {key: asked for key, asked in self._asked.items() if not asked.done()}
        late = TimeoutError(0, f"it did not answer within {PATIENCE_SECONDS:g} s")
        if (asked := self._asked.get((name, path))) is None:
            # Each new version has a folder of its own.
            if [other for other, _ in self._asked].count(name) >= MAX_LATE:
                return late
            asked = self._asked[name, path] = self._begin(path)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(asked), PATIENCE_SECONDS)
        except TimeoutError:
            return late

    def _begin(self, path: str) -> Future[Disk | OSError]:
        answer = Future[Disk | OSError]()
        # One that runs is not cancelled with a wait for it.
        answer.set_running_or_notify_cancel()

        def ask() -> None:
            try:
                answer.set_result(self._read(path))
            except Exception as error:  # noqa: BLE001  # the question that waits raises it
                answer.set_exception(error)

        threading.Thread(target=ask, daemon=True).start()
        return answer


def _space(found: Disk | OSError | None, named: str, otherwise: str) -> dict[str, Any]:
    """Args: named: the folder in a reason; otherwise: the reason where no path is known"""
    if isinstance(found, Disk):
        is_low = found.free_bytes < NEEDED_DISK_BYTES
        return {"free_bytes": found.free_bytes, "total_bytes": found.total_bytes, "nearly_full": is_low}
    reason = otherwise
    if isinstance(found, FileNotFoundError):
        reason = f"the API's machine has no {named}"
    elif found is not None:
        reason = f"the API cannot read the {named}: {found.strerror}"
    return {"free_bytes": None, "total_bytes": None, "nearly_full": None, "reason": reason}
