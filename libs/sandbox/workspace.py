"""The folders of programs: fresh, private, and gone when the program is over, also those that a killed service left."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from leyden.libs.sandbox.place import Names
from leyden.libs.service.errors import Misconfigured
from leyden.libs.telemetry import logger

log = logger()

CHUNK_BYTES = 1 << 20
LEAST_FREE_BYTES = 64 << 10
"""A disk with less room is full."""
ENTRY_BYTES = 4096
"""The least that a file or folder counts, so that the limit bounds their number, too."""
MAX_RESULT_BYTES = 64 << 10
"""The longest file that a program may leave as its result."""


@dataclass(frozen=True)
class AgentFolder:
    """The folder that a run gives its agents or graders.

    Args: descriptor: of the open folder; max_bytes: of its files in sum; stop: ends a copy early; names: for messages
    """

    descriptor: int
    max_bytes: int
    stop: threading.Event
    names: Names


@dataclass(frozen=True)
class Workspace:
    """The files of one program: `work` (its first working folder and HOME), `scratch` (TMPDIR), its task, `files`,
    which it reads, and `lasting`, its /var/tmp."""

    root: Path
    work: Path
    scratch: Path
    task_file: Path
    files: Path

    @property
    def lasting(self) -> Path:
        """The folder that is its /var/tmp, where it has one of its own."""
        return self.root / "var-tmp"

    def shown_at(self, place: Path) -> Workspace:
        """The same workspace as its program sees it at another place."""
        moved = (place / path.relative_to(self.root) for path in (self.work, self.scratch, self.task_file, self.files))
        return Workspace(place, *moved)


@dataclass(frozen=True)
class MoreFiles:
    """Files of a workspace beside those of its folder.

    Args: task_name: a file of the working folder that gets the task, too, in place of a copied one; result_name: a file
        that is not copied; beside: contents of `files` by their paths; None: without that folder
    """

    task_name: str | None = None
    result_name: str | None = None
    beside: Mapping[str, bytes] | None = None


NONE = MoreFiles()


class Workspaces:
    """The folder of this process, locked while it lives.

    Args: parent: shared by a machine's services; owner: this process's name; setting: the name of the parent's.
    Raises: Misconfigured: others may write where the folders are to be
    """

    def __init__(self, parent: Path, owner: str, setting: str) -> None:
        # Programs of another user may pass through to their own folder, never list.
        parent.mkdir(parents=True, exist_ok=True, mode=0o711)
        _check_own(parent, setting)
        self.root = parent / owner
        self.room = parent / "attempt"
        """Empty on the disk. Views are built here, and have the workspace here if the machine has a `/work`."""
        self.room.mkdir(exist_ok=True, mode=0o711)
        with (parent / ".starting").open("w") as starting:
            # One process at a time: before we hold its lock, another that starts would take our folder for abandoned.
            fcntl.flock(starting, fcntl.LOCK_EX)
            _remove_abandoned(parent)
            self.root.mkdir(mode=0o711)
            self._lock = _lock(self.root)

    def make(
        self,
        name: str,
        task: Mapping[str, object],
        folder: AgentFolder | None,
        uid: int | None = None,
        more: MoreFiles = NONE,
    ) -> Workspace:
        """A fresh workspace with the program's files and its task in it. Blocks: call it in a thread.

        Args: uid: the user and group of its owner; None for the service
        Raises: OSError: the folder cannot be copied, or the disk is full; nothing is left then.
        """
        root = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.root))
        workspace = Workspace(root, root / "work", root / "tmp", root / "task.json", root / "files")
        try:
            if folder is None:
                workspace.work.mkdir(mode=0o700)
            else:
                copy_folder(folder, workspace.work)
            workspace.scratch.mkdir(mode=0o700)
            workspace.lasting.mkdir(mode=0o700)
            if more.beside is not None:
                _write_files(workspace.files, more.beside)
            text = json.dumps(task, ensure_ascii=False)
            _write_private(workspace.task_file, text)
            if more.task_name is not None:
                (workspace.work / more.task_name).unlink(missing_ok=True)
                _write_private(workspace.work / more.task_name, text)
            if more.result_name is not None:
                (workspace.work / more.result_name).unlink(missing_ok=True)
            if uid is not None:
                _give(workspace, uid)
        except BaseException:
            remove_tree(root)
            raise
        return workspace

    def close(self) -> None:
        """Removes everything and unlocks the folder. Blocks: call it in a thread."""
        remove_tree(self.root)
        self._lock.close()


def _write_private(path: Path, text: str) -> None:
    """Creates a file, which only its owner may read; never through a link that the agent's folder holds."""
    path.touch(0o600, exist_ok=False)
    path.write_text(text, encoding="utf-8")


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Creates a folder with files to read. Raises: OSError: a path does not lie below it"""
    folder.mkdir()
    for name, content in files.items():
        if name.startswith("/") or not {"", ".", ".."}.isdisjoint(name.split("/")):
            raise OSError(f"{name!r} is no path below a folder")
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    # The program reads them as another user, whatever this process's umask is; no other one passes to the workspace.
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _check_own(parent: Path, setting: str) -> None:
    found = parent.lstat()
    if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o022:
        raise Misconfigured(
            f"{parent} must be a folder, no link, that only the service's user may write to: remove it, or set "
            f"{setting} to another"
        )


def _lock(folder: Path) -> IO[str]:
    lock = (folder / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise
    return lock


def is_locked(folder: Path) -> bool:
    """Whether the process lives that made this folder of workspaces."""
    try:
        _lock(folder).close()
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _remove_abandoned(parent: Path) -> None:
    """Removes the folders of dead processes: their lock is free. A folder without a lock is not ours."""
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


def copy_folder(folder: AgentFolder, target: Path) -> None:
    """Copies folders and regular files, and a link as a link. It opens nothing through a link, as root could.

    Raises: OSError: there is a file of another kind, there is too much, or the copy was stopped
    """
    size = 0
    for path, folders, files, descriptor in os.fwalk(".", onerror=_raise, dir_fd=folder.descriptor):
        (target / path).mkdir(mode=0o700)
        for name in (*folders, *files):
            found = os.lstat(name, dir_fd=descriptor)
            if stat.S_ISLNK(found.st_mode):
                (target / path / name).symlink_to(os.readlink(name, dir_fd=descriptor))
            elif stat.S_ISREG(found.st_mode):
                size = _copy_file(folder, name, descriptor, target / path / name, size)
            elif not stat.S_ISDIR(found.st_mode):
                raise OSError(
                    f"{os.path.normpath(path)}/{name} is no regular file: remove it from {folder.names.directory}"
                )
            size = _count(folder, size + ENTRY_BYTES)


def _copy_file(folder: AgentFolder, name: str, parent: int, target: Path, size: int) -> int:
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent)
    with os.fdopen(descriptor, "rb", buffering=0) as source, target.open("xb") as copy:
        found = os.fstat(source.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{name} was replaced while it was copied")
        while chunk := source.read(CHUNK_BYTES):
            size = _count(folder, size + len(chunk))
            copy.write(chunk)
    target.chmod(found.st_mode & 0o777)
    # Compiled Python is valid only beside a source of the same time.
    os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))
    return size


def _count(folder: AgentFolder, size: int) -> int:
    if folder.stop.is_set():
        raise InterruptedError("stopped")
    if size > folder.max_bytes:
        names = folder.names
        raise OSError(
            f"{names.directory} holds more than {folder.max_bytes} bytes ({names.prefix}_MAX_DIRECTORY_BYTES)"
        )
    return size


def _raise(error: OSError) -> None:
    raise error


def _give(workspace: Workspace, uid: int) -> None:
    """Hands the folders to the program's user; the root only to pass through, so that nothing in it can be moved."""
    os.chown(workspace.root, -1, uid)
    workspace.root.chmod(0o710)
    os.chown(workspace.task_file, uid, uid)
    for inside in (workspace.work, workspace.scratch, workspace.lasting):
        for path in (inside, *inside.rglob("*")):
            os.chown(path, uid, uid, follow_symlinks=False)


def read_result(work: Path, name: str) -> bytes | None:
    """Returns the content of a file that a program left, cut one byte behind the limit; None where there is none.

    It follows no link and waits for no pipe: the service may be root. Blocks.

    Raises: OSError: it is no regular file of its own
    """
    try:
        folder = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        # The program removed it.
        return None
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OSError(f"{name} is no regular file ({error.strerror})") from error
    finally:
        os.close(folder)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise OSError(f"{name} is no regular file of its own")
        return os.read(descriptor, MAX_RESULT_BYTES + 1)
    finally:
        os.close(descriptor)


def others_filled_disk(root: Path) -> bool:
    """Whether the disk of a workspace is full, and less than half of it is the workspace's own. Blocks.

    An agent that could have any attempt repeated by filling the disk would throw away tries that go badly.
    """
    if not root.exists():
        # The agent removed it.
        return False
    disk = os.statvfs(root)
    is_full = disk.f_bavail * disk.f_frsize < LEAST_FREE_BYTES or (disk.f_files > 0 and disk.f_favail == 0)
    if not is_full:
        return False
    du = subprocess.run(["du", "-sk", "--", str(root)], check=False, capture_output=True, text=True)
    own_bytes = int(du.stdout.split()[0]) * 1024 if du.stdout else 0
    return own_bytes * 2 < disk.f_blocks * disk.f_frsize


def remove_tree(root: Path) -> None:
    """Removes a folder whatever a program made of it. Blocks: call it in a thread. It raises nothing, only logs.

    Why `rm`: it follows no link, and no depth or number of files costs it memory or stack.
    """
    remove, make_writable = ["rm", "-rf", "--", str(root)], ["chmod", "-R", "u+rwX", "--", str(root)]
    # The second round is for an ordinary user, against folders that the agent made read-only.
    for command in (remove, make_writable, remove):
        subprocess.run(command, check=False, stderr=subprocess.DEVNULL)
        if not os.path.lexists(root):
            return
    log.warning("folder not removed", folder=str(root))
