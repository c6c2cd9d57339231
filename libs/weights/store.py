"""Versions in an object store: the files of each, and a manifest that is written last.

    <store>/<run>/<version>/<SHA-256 of its weights>/manifest.json
    <store>/<run>/<version>/<SHA-256 of its weights>/files/<name>

A version exists once its manifest does: a publisher that was killed leaves files that nobody reads, and the next one
writes them again. Weights are a part of the name, so that two trainers of one run never write into the same place,
unless they write the same.

StoreUnusable   the store does not answer, refuses, or has no client here; an OSError as well
NotPublished    the store has no such version
Damaged         an object is not what was published; the message names it and the remedy
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import fsspec
from pydantic import BaseModel, ConfigDict, ValidationError

from leyden.libs.contracts.weights import ADAPTER_FOLDER, WEIGHT_SUFFIXES, file_sha256, joint_sha256
from leyden.libs.faults import fault_point

MANIFEST, FILES = "manifest.json", "files"
CHUNK_BYTES = 2**20
BLOCK_BYTES = 8 * 2**20
"""A stream reads so much in one request."""
PART_BYTES, PARTS_AT_ONCE = 16 * 2**20, 4
"""An upload to S3 holds so many parts in memory, with a copy of each; its client's defaults would hold 1 GB."""


class StoreUnusable(OSError):
    """The store does not answer, refuses this process, or has no client here."""


class NotPublished(Exception):
    """The store has no such version."""


class Damaged(Exception):
    """An object is not what was published; the message names it and the remedy."""


class VersionKey(NamedTuple):
    """A version in a store: the weights on record are a part of its name."""

    run_id: str
    version: int
    content_sha256: str


class StoredFile(BaseModel):
    """A file of a published version, by its path in the version's folder."""

    model_config = ConfigDict(frozen=True)

    name: str
    size_bytes: int
    sha256: str


class Manifest(BaseModel):
    """The files of a published version, by name."""

    model_config = ConfigDict(frozen=True)

    files: tuple[StoredFile, ...]

    @property
    def content_sha256(self) -> str:
        """The hash over its weight files, as `weights_sha256` computes it of a folder."""
        weights = (one for one in self.files if PurePosixPath(one.name).suffix in WEIGHT_SUFFIXES)
        return joint_sha256((one.name, one.sha256) for one in weights)

    def part(self, *, adapter: bool) -> list[StoredFile]:
        """All files, or those of the adapter alone."""
        return [one for one in self.files if not adapter or one.name.startswith(f"{ADAPTER_FOLDER}/")]


class WeightStore:
    """An object store, by its address; for threads, since every method waits for the store.

    Raises: StoreUnusable: by every method, where the store cannot be used
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        # Listings of a store that others write are never remembered; a store on the disk makes its folders itself.
        options: dict[str, Any] = {"auto_mkdir": True} if url.startswith("file://") else {}
        with _reporting(self.url):
            self._files, self._root = fsspec.url_to_fs(
                self.url, use_listings_cache=False, skip_instance_cache=True, **options
            )
        is_s3 = "s3" in self._files.protocol
        self._upload = {"chunksize": PART_BYTES, "max_concurrency": PARTS_AT_ONCE} if is_s3 else {}

    def publish(self, key: VersionKey, folder: Path) -> bool:
        """Publishes the files of a version and of its adapter. Returns whether it was new.

        Raises: Damaged: the folder has other weights than the key says; OSError: a file cannot be read
        """
        try:
            self.manifest(key)
        except (NotPublished, Damaged):
            pass
        else:
            return False
        manifest = Manifest(files=tuple(_described(folder)))
        if manifest.content_sha256 != key.content_sha256:
            raise Damaged(f"{folder} is not what the store recorded of version {key.version}: restore it")
        for one in manifest.files:
            with _reporting(self._named(key, one.name)):
                self._files.put_file(str(folder / one.name), self._object(key, one.name), **self._upload)
            fault_point("trainer.file_published")
        with _reporting(self._named(key)):
            self._files.pipe_file(f"{self._place(key)}/{MANIFEST}", manifest.model_dump_json().encode())
        return True

    def reconcile(self, run_id: str, wanted: Mapping[VersionKey, Path], last: int | None = None) -> list[VersionKey]:
        """Publishes the versions of a run that are wanted, the newest first, and removes its others.

        Args:    wanted: their folders; last: later versions stay, since a trainer may be publishing them; None: no
            trainer works
        Returns: those that were new
        Raises:  as `publish`
        """
        published = [key for key in sorted(wanted, reverse=True) if self.publish(key, wanted[key])]
        for key in self.versions(run_id) - wanted.keys():
            if last is None or key.version <= last:
                self.remove(key)
        return published

    def manifest(self, key: VersionKey) -> Manifest:
        """The files of a version. Raises: NotPublished; Damaged: the manifest is not of the key's weights"""
        try:
            with _reporting(self._named(key), reads=True):
                text = self._files.cat_file(f"{self._place(key)}/{MANIFEST}")
        except FileNotFoundError:
            raise NotPublished(f"{self._named(key)} is not published") from None
        try:
            found = Manifest.model_validate_json(text)
        except ValidationError:
            raise self._damaged(key, MANIFEST) from None
        if found.content_sha256 != key.content_sha256 or not all(_is_inside(one.name) for one in found.files):
            raise self._damaged(key, MANIFEST)
        return found

    def fetch(self, key: VersionKey, folder: Path, *, adapter: bool = False) -> None:
        """Copies a version, or its adapter alone, to an empty folder.

        Raises: NotPublished; Damaged; OSError: the folder cannot be written
        """
        for one in self.manifest(key).part(adapter=adapter):
            file = folder / one.name
            file.parent.mkdir(parents=True, exist_ok=True)
            try:
                with _reporting(self._named(key, one.name), reads=True):
                    self._files.get_file(self._object(key, one.name), str(file))
            except FileNotFoundError:
                raise self._damaged(key, one.name) from None
            if file.stat().st_size != one.size_bytes or file_sha256(file) != one.sha256:
                raise self._damaged(key, one.name)
            fault_point("fetcher.file_read")

    def stream(self, key: VersionKey, file: StoredFile) -> Iterator[bytes]:
        """The bytes of a file, piece by piece, and not checked. Raises: OSError: there are fewer than published"""
        with _reporting(self._named(key, file.name)):
            opened = self._files.open(self._object(key, file.name), "rb", block_size=BLOCK_BYTES)
            with opened:
                left = file.size_bytes
                while left:
                    piece = opened.read(min(CHUNK_BYTES, left))
                    if not piece:
                        raise StoreUnusable(f"{self._named(key, file.name)} is shorter than it was published")
                    left -= len(piece)
                    yield piece

    def versions(self, run_id: str) -> set[VersionKey]:
        """The versions of a run of which anything is in the store, half published ones included."""
        place = f"{self._root}/{run_id}"
        try:
            with _reporting(f"{self.url}/{run_id}", reads=True):
                found = [PurePosixPath(path).relative_to(place).parts for path in self._files.find(place)]
        except FileNotFoundError:
            return set()
        return {VersionKey(run_id, int(parts[0]), parts[1]) for parts in found if len(parts) > 2 and parts[0].isdigit()}

    def remove(self, key: VersionKey) -> None:
        """Removes a version: its manifest first, so that nobody meets half of it. A missing one is fine."""
        with _reporting(self._named(key)):
            for path in (f"{self._place(key)}/{MANIFEST}", self._place(key)):
                if self._files.exists(path):
                    self._files.rm(path, recursive=True)

    def remove_run(self, run_id: str) -> None:
        """Removes all versions of a run."""
        for key in self.versions(run_id):
            self.remove(key)

    def _place(self, key: VersionKey) -> str:
        return f"{self._root}/{key.run_id}/{key.version}/{key.content_sha256}"

    def _object(self, key: VersionKey, name: str) -> str:
        return f"{self._place(key)}/{FILES}/{name}"

    def _named(self, key: VersionKey, name: str | None = None) -> str:
        """The address of a version or of one of its files, for messages."""
        place = f"{self.url}/{key.run_id}/{key.version}/{key.content_sha256}"
        return place if name is None else f"{place}/{FILES}/{name}"

    def _damaged(self, key: VersionKey, name: str) -> Damaged:
        shown = f"{self._named(key)}/{MANIFEST}" if name == MANIFEST else self._named(key, name)
        return Damaged(
            f"{shown} is not what was published: remove {self._named(key)}, and the run's trainer publishes it again"
            " from its own folder at its next step or start; of a run that has ended, export it from the claim with"
            " `leyden policy export --context`"
        )


def _described(folder: Path) -> Iterator[StoredFile]:
    """The files of a version and of its adapter by name, without hidden ones."""
    found = [*folder.glob("*"), *folder.glob(f"{ADAPTER_FOLDER}/*")]
    for file in sorted(one for one in found if one.is_file() and not one.name.startswith(".")):
        yield StoredFile(
            name=file.relative_to(folder).as_posix(), size_bytes=file.stat().st_size, sha256=file_sha256(file)
        )


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


@contextmanager
def _reporting(place: str, *, reads: bool = False) -> Iterator[None]:
    """Turns the errors of a store's client, whatever its library, into StoreUnusable.

    Args: reads: FileNotFoundError stays one: there is no such object; a write meets it where there is no bucket
    """
    try:
        yield
    except StoreUnusable:
        raise
    except Exception as error:
        if reads and isinstance(error, FileNotFoundError):
            raise
        cause = f"{type(error).__name__}: {error}"[:300]
        raise StoreUnusable(
            f"{place}: the store cannot be used ({cause}): check its address, endpoint and credentials, and that"
            " leyden[object-store] is installed"
        ) from error
