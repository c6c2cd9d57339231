"""Points, and the folder that arms them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

VARIABLE = "LEYDEN_FAULTS"

# The one reading of the environment outside of settings: a point may stand where no settings are at hand (ADR 0010).
_folder = os.environ.get(VARIABLE)


def fault_point(point: str) -> None:
    """Does nothing, or, when the point is armed, kills this process at once.

    Args: point: `<service>.<moment>`, the moment as what has just happened: `gateway.recorded`
    """
    if _folder is None:
        return
    try:
        # Whoever removes the file is the one that dies: of two processes, never both.
        os.unlink(os.path.join(_folder, point))  # noqa: PTH108, PTH118
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


class FaultInjector:
    """The test's side: arms points in a folder that the processes under test were given as LEYDEN_FAULTS."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def environment(self) -> dict[str, str]:
        """Variables that a process under test needs."""
        return {VARIABLE: str(self.folder)}

    def arm(self, point: str) -> None:
        """The next process that passes the point dies there."""
        (self.folder / point).touch(exist_ok=False)

    def fired(self, point: str, seconds: float = 60.0) -> bool:
        """Whether a process died at the point within this time."""
        deadline = time.monotonic() + seconds
        while (self.folder / point).exists():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True
