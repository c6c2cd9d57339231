"""Compares a version's weight files with the hash on record before engines load them.

The controller moves a damaged folder aside, to `<version>.damaged-<time>`: the trainer exports a version again whose
folder is gone. Version 0 is the operator's own model folder, which stays where it is.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path

from prometheus_client import Counter

from leyden.libs.contracts.weights import weight_files, weights_sha256
from leyden.libs.telemetry import RateLimitedLogger, logger
from leyden.services.controller.engines.targets import TargetVersion

log = logger()
limited_log = RateLimitedLogger(log)

DAMAGED = Counter("controller_weights_damaged_total", "Versions whose files differed from the hash on record.")

FileState = tuple[tuple[str, int, int, int], ...]


class WeightsLost(Exception):
    """The weight files of a version are damaged or gone; the message names the folder and the remedy."""


class WeightCheck:
    """Hashes the files of a target once, and again only after a file changed."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._passed: dict[str, tuple[TargetVersion, FileState]] = {}
        self.lost: dict[str, TargetVersion] = {}
        """By run the target whose files its last check found damaged or gone."""

    async def check(self, target: TargetVersion) -> None:
        """Checks a version's files; passes where this machine does not see the folder that holds its folder.

        Raises: WeightsLost; OSError: a file cannot be read
        """
        folder = Path(target.path)
        async with self._lock:
            if not await asyncio.to_thread(folder.parent.is_dir):
                limited_log.warning("weights not checked", path=target.path, cause="not on this machine")
                return
            state = await asyncio.to_thread(_file_state, folder)
            # An engine may see a model folder that this machine does not have.
            if self._passed.get(target.run_id) == (target, state) or (target.version == 0 and not state):
                self.lost.pop(target.run_id, None)
                return
            if state:
                self.lost.pop(target.run_id, None)
                if await asyncio.to_thread(weights_sha256, folder) == target.content_sha256:
                    self._passed[target.run_id] = target, state
                    return
                DAMAGED.inc()
                log.error("weights damaged", path=target.path, version=target.version)
                if target.version:
                    await asyncio.to_thread(_move_aside, folder)
            self.lost[target.run_id] = target
        remedy = "restore the model folder" if target.version == 0 else "the trainer exports it again if it can"
        raise WeightsLost(f"the weights of version {target.version} in {folder} are damaged or lost: {remedy}")


def _file_state(folder: Path) -> FileState:
    """Returns name, inode, size and time of change of each weight file; empty without any."""
    stats = [(file.name, file.stat()) for file in weight_files(folder)]
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _move_aside(folder: Path) -> None:
    # The trainer may have removed or replaced it meanwhile; the next poll sees which.
    with suppress(FileNotFoundError):
        folder.rename(folder.with_name(f"{folder.name}.damaged-{time.time_ns()}"))
