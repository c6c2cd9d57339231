"""The alarm of versions that an object store lacks, after the end of their run."""

from __future__ import annotations

from sqlalchemy import func, select, text

from leyden.libs.store import tables
from leyden.libs.store.alarms.stored import Judgement
from leyden.libs.store.database import ReadSession, Session

# The judgement of its end may raise the alarm.
_ENDED = text("""
    SELECT a.run_id FROM alarms a JOIN run_status s ON s.run_id = a.run_id
    WHERE a.name = 'not_published' AND a.ended_at IS NULL
        AND s.phase IN ('completed', 'failed', 'cancelled') AND s.finished_at = s.judged_end
    ORDER BY s.finished_at
""")


async def ended_unpublished_runs(session: ReadSession) -> list[str]:
    """Runs that ended and have versions that the store may lack, the longest ended first."""
    return list(await session.scalars(_ENDED))


async def end_unpublished(session: Session, run_id: str) -> Judgement:
    """Ends the alarm of a run: the store has its versions. A repeat changes nothing."""
    table = tables.Alarm
    lasting = (table.run_id == run_id, table.name == "not_published", table.ended_at.is_(None))
    rows = (await session.scalars(select(table).where(*lasting).with_for_update())).all()
    for row in rows:
        row.ended_at = await session.scalar(select(func.clock_timestamp()))
    return Judgement([], rows)
