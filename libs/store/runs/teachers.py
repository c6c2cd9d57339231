"""Versions that teach other runs: they stay, with their run, until those runs have ended."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import select, text

from leyden.libs.store import tables
from leyden.libs.store.database import ReadSession, Session

# A further policy of a run may have a teacher of its own, and a version may be a further policy's.
_LEARNING = """
    SELECT policies.run_id, r.teacher, r.teacher_version AS version
    FROM runs r JOIN policies ON policies.id = r.id LEFT JOIN run_status s ON s.run_id = r.id
    WHERE r.teacher IS NOT NULL AND r.intent NOT IN ('cancelled', 'deleted')
    AND coalesce(s.phase, 'pending') NOT IN ('completed', 'failed', 'cancelled')
"""
_TAUGHT_BY = text(f"""
    SELECT learning.run_id FROM ({_LEARNING}) AS learning JOIN policies ON policies.id = learning.teacher
    WHERE policies.run_id = :run AND learning.run_id <> :run LIMIT 1
""")  # noqa: S608  # constants alone
_TEACHING_VERSIONS = text(f"""
    SELECT version FROM ({_LEARNING}) AS learning WHERE teacher = :policy
""")  # noqa: S608  # constants alone


class TeachingVersion(NamedTuple):
    """A version's folder and hash on record; `is_there`: whether its files have not been removed."""

    path: str
    content_sha256: str
    is_there: bool


async def read_teacher(session: ReadSession, policy_id: str, version: int) -> TeachingVersion | None:
    """One version of a policy, or None."""
    row = await session.get(tables.PolicyVersion, (policy_id, version))
    return None if row is None else TeachingVersion(row.path, row.content_sha256, row.pruned_at is None)


async def lock_teacher(session: Session, policy_id: str) -> bool:
    """Locks the run of a policy, which then removes no version and is not deleted; False if it is unknown or deleted.

    The pruning of its versions and its deletion lock the same row: each is seen by the other.
    """
    run, found = tables.Run, await session.get(tables.Run, policy_id)
    if found is None:
        return False
    query = select(run.intent).where(run.id == (found.lead_run_id or found.id)).with_for_update()
    return await session.scalar(query) not in {None, "deleted"}


async def run_taught_by(session: ReadSession, run_id: str) -> str | None:
    """A run that has not ended and that a version of this one teaches; None without any."""
    found: str | None = await session.scalar(_TAUGHT_BY, {"run": run_id})
    return found


async def teaching_versions(session: ReadSession, policy_id: str) -> set[int]:
    """The versions of a policy that teach runs which have not ended."""
    return set(await session.scalars(_TEACHING_VERSIONS, {"policy": policy_id}))
