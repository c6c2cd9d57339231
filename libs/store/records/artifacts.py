"""Artifacts: the files of an attempt's working folder that its run keeps, written with the attempt's outcome."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from sqlalchemy import insert, text

from leyden.libs.store import tables
from leyden.libs.store.attempts import AttemptKey
from leyden.libs.store.database import ReadSession, Session

_OF_ATTEMPT = text("""
    SELECT path, size_bytes, content FROM artifacts WHERE rollout_id = :rollout AND attempt = :attempt ORDER BY path
""")
_ONE = text("""
    SELECT a.path, a.size_bytes, a.content FROM artifacts a JOIN rollouts r ON r.id = a.rollout_id
    WHERE a.rollout_id = :rollout AND a.path = :path AND a.attempt = coalesce(CAST(:attempt AS integer), a.attempt)
    ORDER BY a.attempt = coalesce(r.attempt, r.grading_attempt) DESC NULLS LAST, a.attempt DESC LIMIT 1
""")
_SIZES = text("""
    SELECT attempt, path, size_bytes, octet_length(content) AS stored_bytes FROM artifacts
    WHERE rollout_id = :rollout ORDER BY attempt, path
""")


class Artifact(NamedTuple):
    """A file as an agent left it. Args: path: below the working folder; size_bytes: as it was; content: its beginning,
    all of it unless it was cut"""

    path: str
    size_bytes: int
    content: bytes


class ArtifactSize(NamedTuple):
    """An artifact without its content."""

    path: str
    size_bytes: int
    stored_bytes: int


class UnknownArtifact(LookupError):
    """The rollout has no file of this path."""


async def add_artifacts(session: Session, kept: Iterable[tuple[AttemptKey, str, Iterable[Artifact]]]) -> None:
    """Writes the files of attempts in the transaction of their outcomes. Args: kept: attempt, its run, and its files"""
    rows = [
        {"rollout_id": attempt.rollout_id, "attempt": attempt.attempt, "run_id": run_id, **one._asdict()}
        for attempt, run_id, artifacts in kept
        for one in artifacts
    ]
    if rows:
        await session.execute(insert(tables.Artifact), rows)


async def artifacts_of(session: ReadSession, attempt: AttemptKey) -> list[Artifact]:
    """Returns the files of an attempt by their paths."""
    rows = await session.execute(_OF_ATTEMPT, {"rollout": attempt.rollout_id, "attempt": attempt.attempt})
    return [Artifact(*row) for row in rows]


async def read_artifact(session: ReadSession, rollout_id: str, path: str, attempt: int | None) -> Artifact:
    """Returns a file of the attempt, or of the one that counts, or else of the last one.

    Raises: UnknownArtifact
    """
    row = (await session.execute(_ONE, {"rollout": rollout_id, "path": path, "attempt": attempt})).one_or_none()
    if row is None:
        raise UnknownArtifact(f"rollout {rollout_id!r} has no file {path!r}: `leyden rollout show` lists those it has")
    return Artifact(*row)


async def artifact_sizes(session: ReadSession, rollout_id: str) -> dict[int, list[ArtifactSize]]:
    """Returns the files of a rollout without their contents, by attempt."""
    found: dict[int, list[ArtifactSize]] = {}
    for row in await session.execute(_SIZES, {"rollout": rollout_id}):
        found.setdefault(row.attempt, []).append(ArtifactSize(row.path, row.size_bytes, row.stored_bytes))
    return found
