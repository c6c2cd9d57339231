"""Judges runs by the table of alarms, and stores what begins, lasts and ends.

- A run is judged again and again, and once more after its end: what holds then stays with the run.
- An alarm ends when its rule has not held for a while, so that a figure near its limit raises one alarm, not many.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from sqlalchemy import func, select, text

from leyden.libs.contracts.alarms import ALARM_RULES, Finding
from leyden.libs.contracts.api.waiting import Volume
from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.states import ENDED, RunPhase
from leyden.libs.store import tables
from leyden.libs.store.alarms.attempts import of_attempts
from leyden.libs.store.alarms.disks import is_unknown, of_disks
from leyden.libs.store.alarms.embeddings import of_embeddings
from leyden.libs.store.alarms.gradings import of_rewards
from leyden.libs.store.alarms.no_progress import of_standstill
from leyden.libs.store.alarms.progress import JudgedRun, made_steps, of_progress
from leyden.libs.store.alarms.steps import unpublished
from leyden.libs.store.alarms.stored import Judgement
from leyden.libs.store.database import ReadSession, Session

SIGNIFICANT_DIGITS = 6

_DUE = text("""
    SELECT run_id FROM run_status
    WHERE phase NOT IN ('completed', 'failed', 'cancelled') OR finished_at IS DISTINCT FROM judged_end
    ORDER BY run_id
""")

# Two controllers judge one run after the other.
_LOCK = text("SELECT pg_advisory_xact_lock(hashtextextended('alarms:' || :run, 0))")


async def runs_to_judge(session: ReadSession) -> list[str]:
    """Runs that have not ended, and those whose end was not judged."""
    return list(await session.scalars(_DUE))


async def findings(
    session: ReadSession, run: tables.Run, phase: RunPhase, volumes: Sequence[Volume] = ()
) -> list[Finding]:
    """The rules that hold for a run now."""
    found = await of_attempts(session, run.id)
    found += [one async for one in of_rewards(session, run.id)]
    config = RunConfig.read(run.config)
    if isinstance(config, RunConfig):
        found += [one async for one in of_progress(session, JudgedRun(run.id, config, phase))]
    else:
        # The controller fails the run with this reason.
        found += unpublished(await made_steps(session, run.id))
    # A further policy has the work, the disks and the embeddings of its run.
    if run.lead_run_id is None:
        found += [one async for one in of_standstill(session, run.id)]
        found += of_disks(volumes)
        if isinstance(config, RunConfig) and config.embeddings is not None and config.embeddings.pool is not None:
            found += [one async for one in of_embeddings(session, run.id, phase, config.embeddings.pool)]
    return [one for one in found if phase not in ENDED or ALARM_RULES[one.name].lasts]


async def judge_run(
    session: Session, run_id: str, quiet_seconds: float = 0.0, volumes: Sequence[Volume] = ()
) -> Judgement:
    """Judges a run, and stores the alarms that begin, last and end.

    A repeat changes nothing; idempotency key: run, rule and subject of the alarm that lasts.

    Args: quiet_seconds: an alarm ends when its rule has not held for so long; at once when the run has ended;
        volumes: the disks that services write to; an alarm about one that is unknown lasts
    """
    await session.execute(_LOCK, {"run": run_id})
    run, status = await session.get_one(tables.Run, run_id), await session.get_one(tables.RunStatus, run_id)
    phase = RunPhase(status.phase)
    table = tables.Alarm
    rows = await session.scalars(select(table).where(table.run_id == run_id, table.ended_at.is_(None)))
    lasting = {(row.name, row.subject): row for row in rows}
    now = await session.scalar(select(func.clock_timestamp()))
    assert now is not None
    number = await session.scalar(select(func.max(table.number)).where(table.run_id == run_id)) or 0
    raised = []
    for one in await findings(session, run, phase, volumes):
        row = lasting.pop((one.name, one.subject), None)
        if row is None:
            number += 1
            row = table(run_id=run_id, number=number, name=one.name, subject=one.subject, raised_at=now)
            raised.append(row)
        row.severity, row.reason, row.seen_at = ALARM_RULES[one.name].severity, one.reason, now
        row.evidence, row.remedy = _plain(one.evidence), one.remedy or ALARM_RULES[one.name].remedy
    session.add_all(raised)
    # Most rules cannot be asked without the document: what lasts beyond a run's end stays as it was.
    is_known = isinstance(RunConfig.read(run.config), RunConfig)
    over = [
        row
        for row in lasting.values()
        if phase in ENDED or row.name != "disk_low" or not is_unknown(row.subject, volumes)
        if is_known or row.name == "not_published" or (phase in ENDED and not ALARM_RULES[row.name].lasts)
    ]
    quiet = [row for row in over if phase in ENDED or (now - row.seen_at).total_seconds() >= quiet_seconds]
    for row in quiet:
        row.ended_at = now
    is_new_end = phase in ENDED and status.judged_end != status.finished_at
    if phase in ENDED:
        status.judged_end = status.finished_at
    await session.flush()
    return Judgement(raised, quiet, phase if is_new_end else None)


def _plain(evidence: Mapping[str, float | str]) -> dict[str, float | str]:
    """Figures that JSON can hold, with few digits."""
    return {
        name: float(f"{value:.{SIGNIFICANT_DIGITS}g}")
        if isinstance(value, float) and math.isfinite(value)
        else str(value)
        if isinstance(value, float)
        else value
        for name, value in evidence.items()
    }
