"""The folders of attempts: fresh, private, and gone when the attempt is over, also those that a killed runner left."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import structlog

log = structlog.get_logger()


@dataclass(frozen=True)
class AttemptFolder:
    """What one attempt has on disk: `work` (where the agent starts, its HOME), `scratch` (TMPDIR) and its task."""

    root: Path
    work: Path
    scratch: Path
    task_file: Path


class Folders:
    """The folder of this runner, locked while it lives.

    Args: parent: shared by a machine's runners; owner: this runner's name; user: (uid, gid) that agents become.
    """

    def __init__(self, parent: Path, owner: str, user: tuple[int, int] | None = None) -> None:
        self._user = user
        # Agents of another user may pass through to their own attempt, never list.
        parent.mkdir(parents=True, exist_ok=True, mode=0o711)
        self.root = parent / owner
        with (parent / ".starting").open("w") as starting:
            # One runner at a time, or a starting one would take our folder for abandoned before we hold its lock.
            fcntl.flock(starting, fcntl.LOCK_EX)
            _remove_abandoned(parent)
            self.root.mkdir(mode=0o711)
            self._lock = _lock(self.root)

    def make(self, name: str, task: Mapping[str, object], directory: str | None) -> AttemptFolder:
        """A fresh folder with the agent's files and its task in it. Blocks: call it in a thread.

        Raises: OSError: the agent's directory cannot be copied, or the disk is full.
        """
        root = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.root))
        folder = AttemptFolder(root, root / "work", root / "tmp", root / "task.json")
        if directory is None:
            folder.work.mkdir()
        else:
            shutil.copytree(directory, folder.work, symlinks=True)
        folder.work.chmod(0o700)
        folder.scratch.mkdir(mode=0o700)
        folder.task_file.write_text(json.dumps(task, ensure_ascii=False), encoding="utf-8")
        if self._user is not None:
            _give(root, self._user)
        return folder

    def remove(self, folder: AttemptFolder) -> None:
        """Removes an attempt's folder, read-only parts included. Blocks: call it in a thread."""
        _remove_tree(folder.root)

    def close(self) -> None:
        """Removes everything and lets go."""
        _remove_tree(self.root)
        self._lock.close()


def _lock(folder: Path) -> IO[str]:
    lock = (folder / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise
    return lock


def _remove_abandoned(parent: Path) -> None:
    """Removes the folders of runners that are dead: their lock is free."""
    for folder in parent.iterdir():
        if not folder.is_dir():
            continue
        try:
            lock = _lock(folder)
        except (BlockingIOError, PermissionError):
            continue
        with lock:
            log.info("abandoned folder removed", folder=folder.name)
            _remove_tree(folder)


def _give(root: Path, user: tuple[int, int]) -> None:
    for path in (root, *root.rglob("*")):
        os.chown(path, *user, follow_symlinks=False)


def _remove_tree(root: Path) -> None:
    """Removes what it can; what resists is logged, since no attempt's outcome depends on it."""
    try:
        shutil.rmtree(root, onerror=_make_writable)
    except OSError as error:
        log.warning("folder not removed", folder=str(root), cause=str(error))
        return
    if root.exists():
        log.warning("folder not removed", folder=str(root))


def _make_writable(function: Callable[..., Any], path: str, _error: object) -> None:
    """Second chance for what an agent made read-only; what resists is left and logged."""
    try:
        Path(path).parent.chmod(0o700)
        if function in {os.open, os.scandir, os.listdir}:
            Path(path).chmod(0o700)
            shutil.rmtree(path, ignore_errors=True)
        else:
            function(path)
    except OSError:
        return
