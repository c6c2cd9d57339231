"""A folder of a node with the versions that its engines load: each is read from the store once.

    <folder>/<run>-<version>-<SHA-256>[-adapter]/        the files, complete and compared with their hashes
    <folder>/.<the same name>.lock                       held while the version is looked up and read

Several processes share the folder, one for each engine of the node.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from prometheus_client import Counter

from leyden.libs.weights.store import VersionKey, WeightStore

READ = Counter("fetcher_versions_read_total", "Versions that this fetcher read from the object store.")


class NodeCache:
    """The versions in a folder.

    Args: size_bytes: beyond it the versions that were asked for longest ago go, whenever one is added; the last one
        that a process of the node was given stays, since its engine may still read it
    """

    def __init__(self, folder: Path, store: WeightStore, size_bytes: int) -> None:
        self._folder, self._store, self._size_bytes = folder, store, size_bytes
        self._given: int | None = None
        self._giving = threading.Lock()

    def fetch(self, key: VersionKey, *, adapter: bool = False) -> Path:
        """Returns the folder of a version, or of its adapter alone. One process reads it, and others wait for that.

        Raises: NotPublished, Damaged, StoreUnusable: as `WeightStore.fetch`; OSError: the folder cannot be written
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"{key.run_id}-{key.version}-{key.content_sha256}{'-adapter' if adapter else ''}"
        folder = self._folder / name
        if not folder.is_dir():
            # First: half of a version may fill the disk.
            self._remove_halves()
        with self._locked(name):
            if not folder.is_dir():
                while not self._read(key, folder, adapter=adapter):
                    pass
                READ.inc()
            # The time of the last question orders what goes.
            os.utime(folder)
            self._give(folder)
        self._shrink(besides=name)
        return folder

    def _read(self, key: VersionKey, folder: Path, *, adapter: bool) -> bool:
        """Reads a version; on a full disk it removes the one that was asked for longest ago, and returns False.

        Raises: OSError: the disk is full, and no version can go
        """
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=self._folder))
        try:
            self._store.fetch(key, scratch, adapter=adapter)
            # Engines of the node may run as other users.
            scratch.chmod(0o755)
            scratch.rename(folder)
        except OSError as error:
            if error.errno not in {errno.ENOSPC, errno.EDQUOT} or not any(map(self._removed, self._by_age())):
                raise
            return False
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return True

    def close(self) -> None:
        """Lets go of the version that was given last, as the end of the process does."""
        with self._giving:
            self._let_go()

    def _give(self, folder: Path) -> None:
        """Holds a version until this process is asked for another one."""
        with self._giving:
            self._let_go()
            self._given = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(self._given, fcntl.LOCK_SH)

    def _let_go(self) -> None:
        if self._given is not None:
            os.close(self._given)
            self._given = None

    def _remove_halves(self) -> None:
        """Removes what killed processes had half read or half removed: nobody holds the lock of its version."""
        for scratch in self._folder.glob(".*.*/"):
            name = scratch.name.removeprefix(".").rpartition(".")[0]
            with suppress(BlockingIOError), self._locked(name, waits=False):
                shutil.rmtree(scratch, ignore_errors=True)
                if not (self._folder / name).is_dir():
                    self._lock_file(name).unlink(missing_ok=True)

    def _shrink(self, besides: str) -> None:
        found = self._by_age()
        sizes = {one: _size(one) for one in found}
        for folder in found:
            if sum(sizes.values()) <= self._size_bytes:
                return
            if folder.name != besides and self._removed(folder):
                del sizes[folder]

    def _by_age(self) -> list[Path]:
        """The versions, those first that were asked for longest ago."""
        found = [one for one in self._folder.iterdir() if one.is_dir() and not one.name.startswith(".")]
        return sorted(found, key=_asked_at)

    def _removed(self, folder: Path) -> bool:
        """Removes a version that no process looks up at this moment, or was given last."""
        with suppress(BlockingIOError), self._locked(folder.name, waits=False), _unused(folder):
            # Under another name first: a version with a name is complete.
            gone = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=self._folder))
            with suppress(FileNotFoundError):
                folder.rename(gone)
            shutil.rmtree(gone)
            self._lock_file(folder.name).unlink(missing_ok=True)
            return True
        return False

    def _lock_file(self, name: str) -> Path:
        return self._folder / f".{name}.lock"

    @contextmanager
    def _locked(self, name: str, *, waits: bool = True) -> Iterator[None]:
        """Holds the lock of a version. Raises: BlockingIOError: another process does, and `waits` is False"""
        file = self._lock_file(name)
        while True:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
                # Whoever removed the version removed this file, too: the lock is then nobody's.
                if not _is_file(file, descriptor):
                    continue
                yield
                return
            finally:
                os.close(descriptor)


@contextmanager
def _unused(folder: Path) -> Iterator[None]:
    """Raises: BlockingIOError: a process holds the folder. One that is gone is unused."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _is_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _asked_at(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _size(folder: Path) -> int:
    try:
        return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    except FileNotFoundError:
        # Another process removes it.
        return 0
