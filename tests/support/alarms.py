"""Alarms of a run, judged now, and alarms that a test stores."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from leyden.libs.contracts.alarms import ALARM_RULES
from leyden.libs.contracts.api.alarms import Alarm
from leyden.libs.store import tables
from leyden.libs.store.alarms.judging import judge_run
from leyden.libs.store.alarms.stored import lasting_alarms
from leyden.libs.store.database import Database


async def alarms(database: Database, run_id: str) -> dict[str, Alarm]:
    """The alarms that a judgement leaves with the run, by rule and subject: `tool_fails sql`."""
    async with database.session() as session:
        await judge_run(session, run_id)
    async with database.read() as session:
        found = (await lasting_alarms(session, [run_id]))[run_id]
    return {f"{one.name} {one.subject or ''}".strip(): one for one in sorted(found, key=lambda one: one.number)}


async def alarm_lines(database: Database, run_id: str) -> list[str]:
    """Reason and remedy of each, in the order in which they were raised."""
    return [f"{one.reason}: {one.remedy}" for one in (await alarms(database, run_id)).values()]


async def add_alarm(
    database: Database, run_id: str, name: str, *, number: int = 1, minutes_ago: float = 0.0, **columns: Any
) -> None:
    """Stores an alarm that began so many minutes ago and lasts, unless `ended_at` says when it ended."""
    rule = ALARM_RULES[name]
    texts = {"subject": "", "reason": f"{name} holds", "remedy": rule.remedy, "evidence": {"share": 0.75}}
    values = {**texts, "severity": rule.severity, "raised_at": datetime.now(tz=UTC) - timedelta(minutes=minutes_ago)}
    async with database.session() as session:
        session.add(tables.Alarm(**{"run_id": run_id, "number": number, "name": name, **values, **columns}))
