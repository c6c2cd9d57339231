"""The folders of attempts: fresh, private, and gone when the attempt is over, also those that a killed runner left."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import structlog

from leyden.libs.service.errors import Misconfigured

log = structlog.get_logger()

SOME = 1000


@dataclass(frozen=True)
class AttemptFolder:
    """What one attempt has on disk: `work` (where the agent starts, its HOME), `scratch` (TMPDIR) and its task."""

    root: Path
    work: Path
    scratch: Path
    task_file: Path


class Folders:
    """The folder of this runner, locked while it lives.

    Args: parent: shared by a machine's runners; owner: this runner's name.
    Raises: Misconfigured: others may write where the folders are to be
    """

    def __init__(self, parent: Path, owner: str) -> None:
        # Agents of another user may pass through to their own attempt, never list.
        parent.mkdir(parents=True, exist_ok=True, mode=0o711)
        _check_own(parent)
        self.root = parent / owner
        with (parent / ".starting").open("w") as starting:
            # One runner at a time, or a starting one would take our folder for abandoned before we hold its lock.
            fcntl.flock(starting, fcntl.LOCK_EX)
            _remove_abandoned(parent)
            self.root.mkdir(mode=0o711)
            self._lock = _lock(self.root)

    def make(
        self, name: str, task: Mapping[str, object], directory: str | None, user: tuple[int, int] | None = None
    ) -> AttemptFolder:
        """A fresh folder with the agent's files and its task in it. Blocks: call it in a thread.

        Args: user: (uid, gid) whose it becomes; the runner's when null
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
        folder.task_file.touch(0o600)
        folder.task_file.write_text(json.dumps(task, ensure_ascii=False), encoding="utf-8")
        if user is not None:
            _give(folder, *user)
        return folder

    def remove(self, folder: AttemptFolder) -> None:
        """Removes an attempt's folder, read-only parts included. Blocks: call it in a thread."""
        remove_tree(folder.root)

    def close(self) -> None:
        """Removes everything and lets go."""
        remove_tree(self.root)
        self._lock.close()


def _check_own(parent: Path) -> None:
    found = parent.lstat()
    if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o022:
        raise Misconfigured(
            f"{parent} must be a folder, no link, that only the runner's user may write to: remove it, or set "
            "RUNNER_WORK_FOLDER to another"
        )


def _lock(folder: Path) -> IO[str]:
    lock = (folder / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise
    return lock


def _remove_abandoned(parent: Path) -> None:
    """Removes the folders of runners that are dead: their lock is free. What has no lock is not ours."""
    for folder in parent.iterdir():
        if not (folder / ".lock").is_file():
            continue
        try:
            lock = _lock(folder)
        except (BlockingIOError, PermissionError):
            continue
        with lock:
            log.info("abandoned folder removed", folder=folder.name)
            remove_tree(folder)


def _give(folder: AttemptFolder, uid: int, gid: int) -> None:
    """Hands an attempt's folders to its user; the root only to pass through, so that nothing in it can be moved."""
    os.chown(folder.root, -1, gid)
    folder.root.chmod(0o710)
    os.chown(folder.task_file, uid, gid)
    for inside in (folder.work, folder.scratch):
        for path in (inside, *inside.rglob("*")):
            os.chown(path, uid, gid, follow_symlinks=False)


def remove_tree(root: Path) -> None:
    """Removes a folder whatever an agent made of it; what resists is logged, since no outcome depends on it.

    Never follows a link, and neither depth nor number of what is there costs memory, descriptors or stack.
    """
    try:
        parent = os.open(root.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _remove(parent, root.name)
        finally:
            os.close(parent)
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("folder not removed", folder=str(root), cause=str(error))


def _remove(parent: int, name: str) -> None:
    """Removes an entry of an open folder. A folder's own folders are moved up into it, so that none is ever deep."""
    try:
        os.unlink(name, dir_fd=parent)
        return
    except (IsADirectoryError, PermissionError):
        # Linux says the first for folders, POSIX the second.
        top = _open_folder(parent, name)
    try:
        numbers = itertools.count()
        while names := _some_names(top):
            for inside in names:
                _empty_and_remove(top, inside, numbers)
    finally:
        os.close(top)
    os.rmdir(name, dir_fd=parent)


def _empty_and_remove(top: int, name: str, numbers: Iterator[int]) -> None:
    """Removes a file, or a folder after its files are gone and its folders have moved to `top`."""
    try:
        os.unlink(name, dir_fd=top)
        return
    except (IsADirectoryError, PermissionError):
        folder = _open_folder(top, name)
    try:
        while names := _some_names(folder):
            for inside in names:
                try:
                    os.unlink(inside, dir_fd=folder)
                except (IsADirectoryError, PermissionError):
                    _move_up(folder, inside, top, numbers)
    finally:
        os.close(folder)
    os.rmdir(name, dir_fd=top)


def _move_up(folder: int, name: str, top: int, numbers: Iterator[int]) -> None:
    # Moving a folder changes its "..", which needs the right to write into it.
    os.close(_open_folder(folder, name))
    while True:
        fresh = f".removed-{next(numbers)}"
        try:
            os.stat(fresh, dir_fd=top, follow_symlinks=False)
        except FileNotFoundError:
            break
    os.rename(name, fresh, src_dir_fd=folder, dst_dir_fd=top)


def _open_folder(parent: int, name: str) -> int:
    """A descriptor of a folder, made readable and writable first.

    Raises: NotADirectoryError: it is something else, a link for example
    """
    found = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent)
    try:
        # This name leads to the very folder that was found, whatever stands at its path by now.
        itself = f"/proc/self/fd/{found}"
        Path(itself).chmod(0o700)
        return os.open(itself, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(found)


def _some_names(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in itertools.islice(entries, SOME)]
