"""Alarms as readers get them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import cast

from sqlalchemy import select, text

from leyden.libs.contracts.api.alarms import Alarm, Severity
from leyden.libs.contracts.api.body import Page
from leyden.libs.store import tables
from leyden.libs.store.database import ReadSession
from leyden.libs.store.read.paging import decode_cursor, page

_COUNTS = text("""
    SELECT a.name, a.severity, count(DISTINCT a.run_id) AS runs
    FROM alarms a JOIN run_status s ON s.run_id = a.run_id
    WHERE a.ended_at IS NULL AND s.phase NOT IN ('completed', 'failed', 'cancelled')
    GROUP BY a.name, a.severity
""")


async def lasting_alarms(session: ReadSession, run_ids: Sequence[str]) -> Mapping[str, list[Alarm]]:
    """The alarms of runs that last, or lasted until the end of their run, by run; critical ones first."""
    table = tables.Alarm
    query = select(table).where(table.run_id.in_(run_ids), table.ended_at.is_(None))
    found = defaultdict[str, list[Alarm]](list)
    for row in await session.scalars(query.order_by(table.severity, table.number)):
        found[row.run_id].append(alarm(row))
    return found


async def list_alarms(session: ReadSession, run_id: str, *, cursor: str | None, limit: int) -> Page[Alarm]:
    """Every alarm of a run, those that have ended included, newest first."""
    table, name = tables.Alarm, f"alarms of {run_id}"
    query = select(table).where(table.run_id == run_id).order_by(table.number.desc()).limit(limit + 1)
    if key := decode_cursor(cursor, name, int):
        query = query.where(table.number < cast(int, key[0]))
    rows = (await session.scalars(query)).all()
    return page(name, rows, limit, alarm, lambda row: (row.number,))


async def runs_by_alarm(session: ReadSession) -> dict[tuple[str, str], int]:
    """Numbers of runs that have not ended, by name and severity of the alarms that they have."""
    return {(row.name, row.severity): row.runs for row in await session.execute(_COUNTS)}


def alarm(row: tables.Alarm) -> Alarm:
    """The alarm of a row."""
    return Alarm(
        run_id=row.run_id,
        number=row.number,
        name=row.name,
        subject=row.subject or None,
        severity=cast(Severity, row.severity),
        since=row.raised_at,
        ended_at=row.ended_at,
        reason=row.reason,
        evidence=row.evidence,
        remedy=row.remedy,
    )
