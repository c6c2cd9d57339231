"""Whether this process may give a program mounts of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_TRY = "import sys; from leyden.libs.sandbox.sandbox import show; show(sys.argv[1], sys.argv[1])"


def can_show(place: Path) -> bool:
    """Whether a child of this process can mount a folder there: root may, unless its container forbids it. Blocks."""
    tried = subprocess.run([sys.executable, "-c", _TRY, str(place)], check=False, capture_output=True)
    return tried.returncode == 0
