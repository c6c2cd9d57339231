"""A run's teacher: where its files are, and whether they are those on record. Its damage is never that of a step."""

from __future__ import annotations

from pathlib import Path

from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.weights import weight_files, weights_sha256
from leyden.libs.store.database import ReadSession
from leyden.libs.store.runs.teachers import read_teacher

_REMEDY = "restore it, or name another teacher in a run that continues this one"


class TeacherDamaged(RuntimeError):
    """The files of a run's teacher are gone, cannot be read, or differ from those that the store recorded."""


async def find_teacher(session: ReadSession, config: RunConfig) -> tuple[Path, str | None] | None:
    """The folder of a run's teacher, and the hash on record of one that is a version; None without distillation, and
    where the run's own model is the teacher.

    Raises: TeacherDamaged: the version is gone
    """
    named = config.algorithm.distillation
    if named is None or named.is_own:
        return None
    if named.model is not None:
        return Path(named.model), None
    assert named.run is not None
    assert named.version is not None
    found = await read_teacher(session, named.run, named.version)
    if found is None or not found.is_there:
        raise TeacherDamaged(
            f"algorithm.distillation: version {named.version} of run {named.run} is gone: name another teacher in a"
            " run that continues this one"
        )
    return Path(found.path), found.content_sha256


def require_teacher(folder: Path, sha256: str | None) -> None:
    """Passes a teacher whose weights are there, and have the hash on record if there is one. Raises: TeacherDamaged"""
    if not weight_files(folder):
        raise TeacherDamaged(f"algorithm.distillation: {folder} is missing: {_REMEDY}")
    if sha256 is not None and weights_sha256(folder) != sha256:
        raise TeacherDamaged(
            f"algorithm.distillation: {folder} is not what the store recorded of this version: {_REMEDY}"
        )


def unreadable_teacher(folder: Path, error: Exception) -> TeacherDamaged:
    """The error of a teacher whose model cannot be loaded."""
    return TeacherDamaged(f"algorithm.distillation: {folder} cannot be loaded ({error}): {_REMEDY}")
