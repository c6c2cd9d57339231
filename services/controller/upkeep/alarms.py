"""Judges runs by the table of alarms, beside the ticks: one run after another, again and again."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import Counter, Gauge

from leyden.libs.contracts.alarms import ALARM_RULES
from leyden.libs.contracts.api.waiting import Volume
from leyden.libs.faults import fault_point
from leyden.libs.service.volumes import Volumes
from leyden.libs.store.alarms.events import record_events
from leyden.libs.store.alarms.judging import judge_run, runs_to_judge
from leyden.libs.store.alarms.stored import Judgement, runs_by_alarm
from leyden.libs.store.database import Database, Refused
from leyden.libs.store.read.waiting import folders_written
from leyden.libs.telemetry import RateLimitedLogger, logger
from leyden.services.controller.settings import Settings
from leyden.services.controller.upkeep.rounds import repeat

log = logger()
limited_log = RateLimitedLogger(log)

RUNS_IN_ALARM = Gauge(
    "controller_run_alarms", "Runs that have not ended, by alarm that they have.", ["alarm", "severity"]
)
RAISED = Counter("controller_alarms_raised_total", "Alarms that began.", ["alarm"])

PAUSE_SECONDS = 5.0
QUIET_SECONDS = 60.0
"""An alarm ends when its rule has not held for so long."""


async def judge_forever(settings: Settings, database: Database) -> None:
    """Judges every run each few seconds, until cancelled."""
    volumes = Volumes()

    async def judge() -> None:
        async with database.read() as session:
            folders = await folders_written(session)
        disks = await volumes.measure(*folders)
        await judge_all(database, disks, with_events=settings.webhook_url is not None)

    try:
        await repeat(judge, PAUSE_SECONDS, "runs not judged")
    finally:
        # The next leader counts.
        _show({})


async def judge_all(database: Database, volumes: Sequence[Volume] = (), *, with_events: bool = False) -> None:
    """Judges runs that have not ended, and each once after its end. One that cannot be judged stops no other.

    Args: volumes: the disks that services write to; with_events: write the events for the webhook, too
    """
    async with database.read() as session:
        runs = await runs_to_judge(session)
    for run_id in runs:
        try:
            async with database.session() as session:
                judged = await judge_run(session, run_id, QUIET_SECONDS, volumes)
                if with_events:
                    await record_events(session, run_id, judged)
                if judged.raised:
                    fault_point("controller.alarm_raised")
            if judged.raised:
                fault_point("controller.alarm_committed")
        except (Refused, LookupError) as error:
            limited_log.warning("run not judged", run_id=run_id, cause=str(error))
            continue
        _report(judged)
    async with database.read() as session:
        _show(await runs_by_alarm(session))


def _report(judged: Judgement) -> None:
    """Counts and logs, after the commit."""
    for row in judged.raised:
        RAISED.labels(row.name).inc()
        log.warning("alarm raised", run_id=row.run_id, alarm=row.name, subject=row.subject, number=row.number)
    for row in judged.ended:
        log.info("alarm ended", run_id=row.run_id, alarm=row.name, subject=row.subject, number=row.number)


def _show(counts: dict[tuple[str, str], int]) -> None:
    """Sets every rule's gauge, so that one without a run shows 0."""
    for rule in ALARM_RULES.values():
        RUNS_IN_ALARM.labels(rule.name, rule.severity).set(counts.get((rule.name, rule.severity), 0))
