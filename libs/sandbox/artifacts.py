"""Files that a program left in its working folder and that patterns name, read as what a stranger wrote.

No link is followed: every folder is opened below its parent, and a file with a second name may be somebody else's.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

MAX_FILES = 200
MAX_BYTES = 2**21
MAX_DEPTH = 32
"""Folders below each other. Deeper ones are left out."""
MAX_ENTRIES = 100_000
"""Names that are looked at. The others are left out."""
MAX_PATH = 1024
"""Bytes in UTF-8. Postgres indexes no key of more than 2,704, and would refuse the attempt's outcome with the path."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK


class KeptFile(NamedTuple):
    """A file. Args: path: below the working folder, printable; size_bytes: as it was; content: its beginning"""

    path: str
    size_bytes: int
    content: bytes


@dataclass
class KeptFiles:
    """The files in the order of their paths, and the number of those that patterns name and that are not kept."""

    files: list[KeptFile] = field(default_factory=list)
    left_out: int = 0


Places = frozenset[tuple[int, int]]
"""Pattern and place in it that a path has come to, for each pattern that may still name it."""


class Patterns:
    """Path patterns, matched name by name in linear time. `**` is any number of folders, and at the end every file."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._parts = [pattern.split("/") for pattern in patterns]

    def begin(self) -> Places:
        """Returns the places of the working folder."""
        return self._with_skipped((number, 0) for number in range(len(self._parts)))

    def after(self, places: Places, name: str) -> Places:
        """Returns the places one name further; without any, no pattern names anything there."""
        found: set[tuple[int, int]] = set()
        for number, place in places:
            parts = self._parts[number]
            if place == len(parts):
                continue
            if parts[place] == "**":
                found.add((number, place))
            elif fnmatchcase(name, parts[place]):
                found.add((number, place + 1))
        return self._with_skipped(found)

    def name(self, places: Places) -> bool:
        """Whether a pattern ends here."""
        return any(place == len(self._parts[number]) for number, place in places)

    def go_below(self, places: Places) -> bool:
        """Whether a pattern may name something in the folder here."""
        return any(place < len(self._parts[number]) for number, place in places)

    def _with_skipped(self, places: Iterable[tuple[int, int]]) -> Places:
        found: set[tuple[int, int]] = set()
        for number, place in places:
            parts = self._parts[number]
            found.add((number, place))
            while place < len(parts) and parts[place] == "**":
                place += 1
                found.add((number, place))
        return frozenset(found)


def read_artifacts(work: Path, patterns: Sequence[str]) -> KeptFiles:
    """Returns the files that the patterns name. Blocks: call it in a thread once all processes of the program are dead.

    Links, devices, pipes, files with several names and names that are not printable are left out.
    """
    walk = _Walk(Patterns(patterns))
    if patterns:
        walk.go_below(None, str(work), "", walk.patterns.begin(), 0)
    return walk.kept


@dataclass
class _Walk:
    patterns: Patterns
    kept: KeptFiles = field(default_factory=KeptFiles)
    entries: int = 0
    size: int = 0

    def go_below(self, parent: int | None, name: str, path: str, places: Places, depth: int) -> None:
        """Looks at what lies in a folder, unless it is too deep or cannot be opened."""
        if depth > MAX_DEPTH:
            self.kept.left_out += 1
            return
        try:
            with _opened(name, parent) as folder:
                self._look_at(folder, path, places, depth)
        except OSError:
            # The program removed it, or closed it to the service.
            self.kept.left_out += 1

    def _look_at(self, folder: int, path: str, places: Places, depth: int) -> None:
        for name in self._names(folder):
            after = self.patterns.after(places, name)
            if not after:
                continue
            found, child = os.lstat(name, dir_fd=folder), f"{path}{name}"
            if not stat.S_ISDIR(found.st_mode):
                if self.patterns.name(after):
                    self._keep(folder, name, child, found)
            elif self.patterns.go_below(after):
                self.go_below(folder, name, f"{child}/", after, depth + 1)

    def _names(self, folder: int) -> list[str]:
        """Sorted, so that the same files are kept of the same folder."""
        names = []
        with os.scandir(folder) as entries:
            for entry in entries:
                self.entries += 1
                if self.entries > MAX_ENTRIES:
                    self.kept.left_out += 1
                    break
                names.append(entry.name)
        return sorted(names)

    def _keep(self, folder: int, name: str, path: str, found: os.stat_result) -> None:
        is_own = stat.S_ISREG(found.st_mode) and found.st_nlink == 1
        is_storable = path.isprintable() and len(path.encode()) <= MAX_PATH
        if not is_own or not is_storable or len(self.kept.files) == MAX_FILES:
            self.kept.left_out += 1
            return
        try:
            content = _read(folder, name, MAX_BYTES - self.size)
        except OSError:
            self.kept.left_out += 1
            return
        self.size += len(content)
        self.kept.files.append(KeptFile(path, max(found.st_size, len(content)), content))


@contextmanager
def _opened(name: str, folder: int | None = None) -> Iterator[int]:
    descriptor = os.open(name, _FOLDER, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read(folder: int, name: str, limit: int) -> bytes:
    """Raises: OSError: it is no regular file of one name any more, or cannot be read"""
    with os.fdopen(os.open(name, _FILE, dir_fd=folder), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise OSError(f"{name} is no regular file of its own")
        return file.read(limit)
