"""The rule about a run at work of which nothing moves: before its first steps, between steps, or in an evaluation.

Runs in line and paused ones wait by design, as do those whose rollouts are with people, external agents or the trainer:
it asks for the controller's reason, or for rollouts that no runner takes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from sqlalchemy import text

from leyden.libs.contracts.alarms import ALARM_RULES, Finding
from leyden.libs.store.alarms.attempts import MAX_CAUSE
from leyden.libs.store.attempts import MAY_RUN, RUNNER_TYPE
from leyden.libs.store.database import ReadSession

# Attempts end by their time-outs, and grades that wait have a rule of their own. Runners of a type serve all runs:
# while one of them works, rollouts wait in a queue.
_IDLE = text(f"""
    SELECT s.reason, (
            SELECT count(*) FROM rollouts r JOIN groups g ON g.id = r.group_id
            WHERE r.run_id = u.id AND {MAY_RUN} AND {RUNNER_TYPE} <> 'external'
                AND NOT EXISTS (
                    SELECT FROM attempts a JOIN rollouts o ON o.id = a.rollout_id JOIN groups og ON og.id = o.group_id
                    JOIN runs ou ON ou.id = og.run_id
                    WHERE a.state IN ('leased', 'running')
                        AND coalesce(og.runner_type, ou.runner_type) = {RUNNER_TYPE})
        ) AS untaken,
        extract(epoch FROM clock_timestamp() - coalesce(s.reason_since, s.updated_at))::float8 AS reason_seconds,
        extract(epoch FROM clock_timestamp() - greatest(
            s.updated_at,
            (SELECT max(created_at) FROM outcomes WHERE run_id = u.id),
            (SELECT max(created_at) FROM group_credits WHERE run_id = u.id),
            (SELECT max(created_at) FROM steps WHERE run_id = u.id),
            (SELECT max(created_at) FROM policy_versions WHERE run_id = u.id)))::float8 AS seconds
    FROM run_status s JOIN runs u ON u.id = s.run_id
    WHERE s.run_id = :run AND s.phase IN ('running', 'evaluating') AND NOT EXISTS (
        SELECT FROM rollouts r WHERE r.run_id = u.id AND r.state = 'queued' AND (
            r.grading_attempt > r.excused_attempt OR EXISTS (
                SELECT FROM attempts a WHERE a.rollout_id = r.id AND a.state IN ('leased', 'running'))))
""")  # noqa: S608  # constants alone


async def of_standstill(session: ReadSession, run_id: str) -> AsyncIterator[Finding]:
    """The rule for a run; its further policies wait with it."""
    rule = ALARM_RULES["no_progress"]
    row = (await session.execute(_IDLE, {"run": run_id})).one_or_none()
    if row is None:
        return
    cause = row.reason or (f"no runner takes any of its {row.untaken} rollouts" if row.untaken else None)
    # A trainer may work for long, and an engine that misses a poll meanwhile is no cause of it.
    seconds = min(row.seconds, row.reason_seconds) if row.reason else row.seconds
    if cause is not None and seconds > rule.limit:
        reason = f"nothing of the run has moved for {seconds:.0f} s: {cause[:MAX_CAUSE]}"
        yield Finding(rule.name, reason, {"seconds": seconds, "limit_seconds": rule.limit})
