"""Folders of a run's files. A folder gets its name only once its files are complete and on the disk.

    <root>/<run>/versions/<n>/      a Hugging Face folder: engines serve it, and a resumed trainer reads its weights
    <root>/<run>/checkpoints/<n>/   what a resumed trainer needs beside the weights

The trainer writes a version before it records the step, and the checkpoint only afterwards: engines need not wait for
it. A crash before the step's transaction leaves a version that no row names; the trainer replaces it when it makes the
step again. A crash between the transaction and the checkpoint loses only that step's optimiser state; `resume`
recomputes it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from leyden.libs.faults import fault_point

FILE_BYTES = 2**30
"""The most that is gathered for a version, or written in one file: it lies twice in host memory meanwhile."""

DISK_IS_FULL = {errno.ENOSPC, errno.EDQUOT}
"""Numbers of an OSError that passes once there is room."""

LockCheck = Callable[[], None]
"""Raises where this process may no longer write into the run's folder."""


def no_lock() -> None:
    """The lock check of a folder that has no other writer."""


class CheckpointDamaged(RuntimeError):
    """Files are missing or differ from those that the store recorded; the message names them and the remedy."""


class VersionDamaged(CheckpointDamaged):
    """Those of a step's version; its checkpoint may hold the weights, too."""


def version_folder(root: Path, run_id: str, version: int) -> Path:
    """The folder of a version's weights."""
    return root / run_id / "versions" / str(version)


def checkpoint_folder(root: Path, run_id: str, step: int) -> Path:
    """The folder of the optimiser's state after a step."""
    return root / run_id / "checkpoints" / str(step)


def in_parts(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Names of tensors in parts of at most `FILE_BYTES`, or of one tensor."""
    names, size = list[str](), 0
    for name, tensor in tensors.items():
        # This counts the shards of all ranks, so that every rank gets the same parts.
        own = tensor.numel() * tensor.element_size()
        if names and size + own > FILE_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += own
    yield names


def remove_folder(folder: Path) -> None:
    """Removes a version or checkpoint; a missing folder is fine. Nobody meets the folder half removed."""
    with contextlib.suppress(OSError):
        folder = folder.rename(_scratch_name(folder))
    shutil.rmtree(folder, ignore_errors=True)


def clear_scratch(root: Path, run_id: str) -> None:
    """Removes the unfinished folders of a killed trainer. Only the holder of the run's lock may call it."""
    for scratch in (root / run_id).glob("*/.*.partial"):
        remove_folder(scratch)


def new_scratch(folder: Path, check_lock: LockCheck = no_lock) -> Path:
    """Makes a folder of another name for the files that `folder` will have. Raises: whatever `check_lock` raises"""
    check_lock()
    # The random name is this process's own: a trainer that has just lost the run may still write into its scratch.
    scratch = _scratch_name(folder)
    scratch.mkdir(parents=True)
    return scratch


@contextmanager
def named(scratch: Path, folder: Path, check_lock: LockCheck, *, moment: str) -> Iterator[Path]:
    """Yields `scratch`; after the block, brings the files of `scratch` to the disk and renames it to `folder`.

    Args:   check_lock: called before the rename, and after an OSError; moment: the fault point at which no folder has
                the name
    Raises: OSError: files cannot be written, or another folder has the name by the end; whatever `check_lock` raises
    """
    try:
        yield scratch
        for file in scratch.rglob("*"):
            if file.is_file():
                file.chmod(0o644)  # save_file gives its files to their owner alone.
            _sync(file)
        _sync(scratch)
        written = scratch.stat()
        check_lock()
        _rename(scratch, folder, moment=moment)
        _sync(folder.parent)
        if not os.path.samestat(folder.stat(), written):
            raise OSError(
                f"{folder} is not the folder that was given this name, though no other trainer has the run: where its"
                " file system gives a renamed folder another identity, set TRAINER_FOLDER to a folder on another one"
            )
    except OSError:
        # A trainer that lost the run meets files that the next one cleared: LockLost is then the cause to report.
        check_lock()
        raise
    finally:
        remove_folder(scratch)


def _rename(scratch: Path, folder: Path, *, moment: str) -> None:
    """Renames `scratch` to `folder` and removes the folder that had the name: it belongs to a step never committed."""
    old = _scratch_name(folder)
    # Removed under another name: NFS retains the folder of a file that an engine on this machine has mapped.
    with contextlib.suppress(FileNotFoundError):
        folder.rename(old)
    fault_point(moment)
    scratch.rename(folder)
    remove_folder(old)


def _scratch_name(folder: Path) -> Path:
    """A new name beside `folder` that `clear_scratch` recognises."""
    return folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.partial")


def save_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Writes a safetensors file. Raises: OSError: the disk is full, the folder is gone, …"""
    try:
        save_file(dict(tensors), file, metadata={"format": "pt"})
    except SafetensorError as error:
        # The library reports the system's errors in its message alone.
        if number := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(number[1]), str(error)) from error
        raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
