"""A version's folder as a stream of tar: a piece of a file is in memory at a time, however large the weights are."""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from leyden.libs.contracts.weights import ADAPTER_FOLDER
from leyden.libs.weights import StoredFile, VersionKey, WeightStore

CHUNK_BYTES = 2**20
BLOCK = tarfile.BLOCKSIZE
# Hugging Face's cache keeps the files of a snapshot in this folder beside all snapshots.
CACHE_FILES = Path("..", "..", "blobs")


class UnsafeFile(ValueError):
    """A link of the folder leads out of it."""


@dataclass(frozen=True)
class File:
    """A file of a version: its name in the archive, where its bytes are, and their number."""

    name: str
    path: Path
    size_bytes: int


def version_files(folder: Path) -> list[File]:
    """The files of a version and of its adapter, by name; hidden ones and other folders are no part of it.

    Raises: UnsafeFile; OSError: the folder is not there, or cannot be read
    """
    root = folder.resolve(strict=True)
    allowed = (root, (root / CACHE_FILES).resolve())
    adapter = root / ADAPTER_FOLDER
    entries = [*root.iterdir(), *(adapter.iterdir() if adapter.is_dir() else ())]
    found = list[File]()
    for entry in sorted(entries):
        if entry.name.startswith(".") or not entry.is_file():
            continue
        path = entry.resolve(strict=True)
        name = str(entry.relative_to(root))
        if not any(path.is_relative_to(place) for place in allowed):
            raise UnsafeFile(f"{name} is a link that leads out of the folder: put the file itself there")
        found.append(File(name, path, path.stat().st_size))
    return found


def archive_bytes(files: Sequence[File | StoredFile]) -> int:
    """The exact length of the stream."""
    return sum(len(_head(one)) + one.size_bytes + _padding(one) for one in files) + 2 * BLOCK


def open_archive(files: Sequence[File]) -> Generator[bytes]:
    """Opens all files, so that they stay whole while the trainer removes the version, and returns the stream.

    The stream raises OSError where a file has become shorter.
    Raises: OSError: a file is gone, or is no file any more
    """
    with ExitStack() as stack:
        opened = [(one, stack.enter_context(_opened(one))) for one in files]
        stream = _stream(opened, stack.pop_all())
    # Begun, it closes the files even if nobody reads it.
    next(stream)
    return stream


def stored_archive(store: WeightStore, key: VersionKey, files: Sequence[StoredFile]) -> Iterator[bytes]:
    """The stream of a version in an object store. Raises: OSError: the store fails, or has fewer bytes"""
    for one in files:
        yield _head(one)
        yield from store.stream(key, one)
        yield bytes(_padding(one))
    yield bytes(2 * BLOCK)


def _opened(file: File) -> BinaryIO:
    # The path is resolved: a link in its place has come since.
    descriptor = os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    stream = os.fdopen(descriptor, "rb", buffering=0)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        stream.close()
        raise OSError(f"{file.name} is no file any more")
    return stream


def _stream(opened: Sequence[tuple[File, BinaryIO]], stack: ExitStack) -> Generator[bytes]:
    with stack:
        yield b""
        for file, stream in opened:
            yield _head(file)
            left = file.size_bytes
            while left:
                piece = stream.read(min(CHUNK_BYTES, left))
                if not piece:
                    raise OSError(f"{file.name} has become shorter while it was read")
                left -= len(piece)
                yield piece
            yield bytes(_padding(file))
        yield bytes(2 * BLOCK)


def _head(file: File | StoredFile) -> bytes:
    info = tarfile.TarInfo(file.name)
    info.size = file.size_bytes
    return info.tobuf(tarfile.PAX_FORMAT)


def _padding(file: File | StoredFile) -> int:
    return -file.size_bytes % BLOCK
