"""A policy version in a folder that has its name once all of it is there, and the API's stream of one."""

from __future__ import annotations

import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import RawIOBase
from pathlib import Path

from leyden.libs.client.errors import Refused
from leyden.libs.contracts.weights import weights_sha256


class _Chunks(RawIOBase):
    """A stream of chunks as a file that tarfile reads."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return b""
            self._rest = memoryview(chunk)
        piece = bytes(self._rest[: size if size >= 0 else None])
        self._rest = self._rest[len(piece) :]
        return piece


@contextmanager
def version_folder(folder: Path, content_sha256: str) -> Iterator[Path]:
    """A path beside `folder` for the files of a version. They get the name `folder` once they are there and whole.

    Raises: Refused: there is something of this name, no folder to make it in, or the weights are not those of the
        digest
    """
    if folder.exists() or folder.is_symlink():
        raise Refused(f"{folder} exists: name a folder that does not")
    if not folder.parent.is_dir():
        raise Refused(f"{folder.parent} is no folder: make it first")
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        made = Path(scratch) / "version"
        yield made
        if (found := weights_sha256(made)) != content_sha256:
            raise Refused(
                f"the copied weights have the digest {found}, and the trainer recorded {content_sha256}: the files on"
                " the platform are damaged"
            )
        made.rename(folder)


def unpack_version(chunks: Iterator[bytes], folder: Path) -> None:
    """Writes the archive to a new folder."""
    folder.mkdir()
    with tarfile.open(fileobj=_Chunks(chunks), mode="r|") as archive:
        # The filter refuses names that lead out of the folder, links and devices.
        archive.extractall(folder, filter="data")
