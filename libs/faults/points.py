"""Fault points in the code, and the injector that arms them from a test."""

from __future__ import annotations

import os
import signal
import time
from functools import cache
from pathlib import Path

from leyden.libs.faults.settings import VARIABLE, FaultSettings


@cache
def _folder() -> Path | None:
    return FaultSettings().folder


def fault_point(point: str) -> None:
    """Kills this process when a test has armed the point; does nothing otherwise.

    Args: point: `<service>.<step>`, named for the step that is complete: `gateway.recorded`
    """
    folder = _folder()
    if folder is None:
        return
    try:
        # Only one process can remove the file: of two that reach the point, one dies.
        os.unlink(os.path.join(folder, point))  # noqa: PTH108, PTH118
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
        """Returns the environment variables for a process under test."""
        return {VARIABLE: str(self.folder)}

    def arm(self, point: str) -> None:
        """Makes the next process that reaches the point kill itself."""
        (self.folder / point).touch(exist_ok=False)

    def fired(self, point: str, seconds: float = 60.0) -> bool:
        """Whether a process dies at the point within this time."""
        deadline = time.monotonic() + seconds
        while (self.folder / point).exists():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True
