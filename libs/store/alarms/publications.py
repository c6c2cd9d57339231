"""The alarm of versions that an object store lacks, after the end of their run."""

from __future__ import annotations

from sqlalchemy import text

from leyden.libs.store.database import ReadSession, Session

# The judgement of its end may raise the alarm.
_ENDED = text("""
    SELECT a.run_id FROM alarms a JOIN run_status s ON s.run_id = a.run_id
    WHERE a.name = 'not_published' AND a.ended_at IS NULL
        AND s.phase IN ('completed', 'failed', 'cancelled') AND s.finished_at = s.judged_end
    ORDER BY s.finished_at
""")

_END = text("""
    UPDATE alarms SET ended_at = clock_timestamp() WHERE run_id = :run AND name = 'not_published' AND ended_at IS NULL
""")


async def ended_unpublished_runs(session: ReadSession) -> list[str]:
    """Runs that ended and have versions that the store may lack, the longest ended first."""
    return list(await session.scalars(_ENDED))


async def end_unpublished(session: Session, run_id: str) -> None:
    """Ends the alarm of a run: the store has its versions. A repeat changes nothing."""
    await session.execute(_END, {"run": run_id})
