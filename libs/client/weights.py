"""A policy version from the API's stream into a folder, which has its name once all of it is there."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from collections.abc import Iterator
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


def check_free(folder: Path) -> None:
    """Raises: Refused: there is something of this name, or no folder to make it in"""
    if folder.exists() or folder.is_symlink():
        raise Refused(f"{folder} exists: name a folder that does not")
    if not folder.parent.is_dir():
        raise Refused(f"{folder.parent} is no folder: make it first")


def unpack_version(chunks: Iterator[bytes], folder: Path, content_sha256: str) -> None:
    """Writes the archive to a new folder beside `folder`, checks its weights, and gives it the name.

    Raises: Refused: the weights are not those of the digest
    """
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        with tarfile.open(fileobj=_Chunks(chunks), mode="r|") as archive:
            # The filter refuses names that lead out of the folder, links and devices.
            archive.extractall(scratch, filter="data")
        if (found := weights_sha256(scratch)) != content_sha256:
            raise Refused(
                f"the downloaded weights have the digest {found}, and the trainer recorded {content_sha256}: the files"
                " on the platform are damaged"
            )
        scratch.chmod(0o755)
        scratch.rename(folder)
    except BaseException:
        shutil.rmtree(scratch)
        raise
