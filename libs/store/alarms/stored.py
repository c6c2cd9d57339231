"""Alarms as a judgement changes them, and as readers get them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from sqlalchemy import select, text

from leyden.libs.contracts.api.alarms import Alarm, Severity
from leyden.libs.contracts.states import RunPhase
from leyden.libs.store import tables
from leyden.libs.store.database import ReadSession

_COUNTS = text("""
    SELECT a.name, a.severity, count(DISTINCT p.run_id) AS runs
    FROM alarms a JOIN policies p ON p.id = a.run_id JOIN run_status s ON s.run_id = a.run_id
    WHERE a.ended_at IS NULL AND s.phase NOT IN ('completed', 'failed', 'cancelled')
    GROUP BY a.name, a.severity
""")


@dataclass(frozen=True)
class Judgement:
    """The changes of a judgement. `ended_as`: the phase in which the run has ended, when it is judged so first."""

    raised: Sequence[tables.Alarm]
    ended: Sequence[tables.Alarm]
    ended_as: RunPhase | None = None


async def lasting_alarms(session: ReadSession, run_ids: Sequence[str]) -> Mapping[str, list[Alarm]]:
    """The alarms of runs that last, or lasted until the end of their run, by run; critical ones first."""
    table = tables.Alarm
    query = select(table).where(table.run_id.in_(run_ids), table.ended_at.is_(None))
    found = defaultdict[str, list[Alarm]](list)
    for row in await session.scalars(query.order_by(table.severity, table.number)):
        found[row.run_id].append(alarm(row))
    return found


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
