"""The checkout, and files that agents write to: pytest's folders are closed to the user that an agent becomes."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROMETHEUS = ROOT / ".cache" / "prometheus" / "usr" / "bin"
"""The folder of `prometheus` and `promtool`; `make setup` fills it."""


def open_to_agents(path: Path) -> Path:
    """A file that every user may append to, in a folder where agents find it; `path` itself if it is one already.

    Otherwise `path` becomes a link to it, and the file itself when this process ends.
    """
    real = Path(os.path.realpath(path))
    if real.exists() and real.stat().st_mode & 2 and all(parent.stat().st_mode & 1 for parent in real.parents):
        return real
    folder = Path(tempfile.mkdtemp(prefix="leyden-agents-log-"))
    there = folder / path.name
    atexit.register(_bring_back, there, path)
    folder.chmod(0o711)
    there.write_bytes(path.read_bytes() if path.exists() else b"")
    there.chmod(0o666)
    path.unlink(missing_ok=True)
    path.symlink_to(there)
    return there


def _bring_back(there: Path, path: Path) -> None:
    if path.is_symlink() and there.exists():
        path.unlink()
        shutil.move(there, path)
    shutil.rmtree(there.parent, ignore_errors=True)


def free_port() -> int:
    """A free port below those that the system assigns, so that nobody takes it before the process that gets it does."""
    while True:
        port = 20_000 + secrets.randbelow(10_000)
        with socket.socket() as taken, contextlib.suppress(OSError):
            taken.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def refusing_port() -> Iterator[int]:
    """A port that refuses connections: it is bound, so that no other process gets it, and nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]
