"""Fault points in the code, and the injector that arms them from a test."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from leyden.libs.faults.settings import VARIABLE, FaultSettings

_folder = FaultSettings().folder


def fault_point(point: str) -> None:
    """Kills this process when a test has armed the point; does nothing otherwise.

    Args: point: `<service>.<moment>`, named for the step before it: `gateway.recorded`
    """
    if _folder is None:
        return
    try:
        # One process alone can remove the file: of two that pass, one dies.
        os.unlink(os.path.join(_folder, point))  # noqa: PTH108, PTH118
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


class FaultInjector:
    """Arms points for the processes that a test starts with `environment`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def environment(self) -> dict[str, str]:
        """Variables that a process under test needs."""
        return {VARIABLE: str(self.folder)}

    def arm(self, point: str) -> None:
        """Kills the next process that passes the point."""
        (self.folder / point).touch(exist_ok=False)

    def fired(self, point: str, seconds: float = 60.0) -> bool:
        """Whether a process dies at the point within this time."""
        deadline = time.monotonic() + seconds
        while (self.folder / point).exists():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True
