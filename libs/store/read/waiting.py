"""Rollouts that wait for people's grades, and the counts of all work that waits."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import text

from leyden.libs.contracts.api.waiting import MissingFeedback, Platform, ServiceState, WaitingPage, WaitingRollout
from leyden.libs.store.database import ReadSession
from leyden.libs.store.read.paging import decode_cursor, page
from leyden.libs.store.read.views import count_work
from leyden.libs.store.runs.feedback import AWAITS_FEEDBACK

SERVICES = ("api", "gateway", "controller", "runner", "collector", "credit", "grader", "trainer")
TASK_CHARACTERS = 20_000
OUTPUT_CHARACTERS = 20_000

_GRADED = """
    rollouts r JOIN runs u ON u.id = r.run_id
    JOIN attempts a ON a.rollout_id = r.id AND a.number = r.grading_attempt
    LEFT JOIN gradings g ON g.rollout_id = r.id AND g.attempt = a.number
    WHERE r.state = 'queued' AND r.grading_attempt > r.excused_attempt AND g.settled_at IS NULL
"""

_WAITING = text(f"""
    SELECT r.id AS rollout_id, r.run_id, u.name AS run_name, a.number AS attempt, groups.task_number,
        a.finished_at AS since, a.finished_at + make_interval(secs => u.feedback_seconds) AS due_at,
        coalesce(left(tasks.payload::text, :task_characters), '') AS task,
        coalesce(right(outcomes.stdout_tail, :output_characters), '') AS output,
        (SELECT jsonb_agg(jsonb_build_object('component', component, 'needed', needed, 'given', given) ORDER BY place)
            FROM (
                SELECT c.component, c.place, coalesce(u.feedback_values, 1) AS needed, (
                    SELECT count(*) FROM feedback f
                    WHERE f.rollout_id = r.id AND f.attempt = a.number AND f.component = c.component) AS given
                FROM jsonb_array_elements_text(u.feedback_components) WITH ORDINALITY AS c (component, place)
            ) AS asked WHERE given < needed) AS missing
    FROM (SELECT r.id FROM {_GRADED} AND {AWAITS_FEEDBACK}
            AND ((:run_id)::text IS NULL OR r.run_id = :run_id)
            AND ((:after_id)::text IS NULL OR (a.finished_at, r.id) > (CAST(:after AS timestamptz), :after_id))
        ORDER BY a.finished_at, r.id LIMIT :limit) AS chosen
    JOIN rollouts r ON r.id = chosen.id JOIN runs u ON u.id = r.run_id
    JOIN attempts a ON a.rollout_id = r.id AND a.number = r.grading_attempt
    JOIN groups ON groups.id = r.group_id
    LEFT JOIN tasks ON tasks.dataset_id = groups.dataset_id AND tasks.number = groups.task_number
    LEFT JOIN outcomes ON outcomes.rollout_id = r.id AND outcomes.attempt = a.number
    ORDER BY a.finished_at, r.id
""")  # noqa: S608  # constants alone

_COUNTS = text(f"""
    SELECT count(*) FILTER (WHERE awaits) AS feedback, count(*) FILTER (WHERE NOT awaits) AS grades FROM (
        SELECT {AWAITS_FEEDBACK} AS awaits FROM {_GRADED} AND ((:run_id)::text IS NULL OR r.run_id = :run_id)
    ) AS found
""")  # noqa: S608  # constants alone

# Services name themselves to the database; a process that is gone has no connection.
_SERVICES = text("""
    SELECT application_name AS name, count(*) AS connections, max(state_change) AS active_at FROM pg_stat_activity
    WHERE datname = current_database() AND application_name = ANY(:names) GROUP BY 1
""")

_BYTES = text("""
    SELECT pg_database_size(current_database()) AS database,
        (SELECT coalesce(sum(size_bytes), 0)::bigint FROM policy_versions WHERE pruned_at IS NULL) AS weights
""")

# Postgres tells its folder to few; elsewhere than on this machine the path would be another disk's.
_FOLDERS = text("""
    SELECT (SELECT path FROM policy_versions WHERE pruned_at IS NULL AND version > 0
            ORDER BY created_at DESC LIMIT 1) AS versions,
        CASE WHEN coalesce(host(inet_server_addr()) IN ('127.0.0.1', '::1'), true)
            AND pg_has_role(current_user, 'pg_read_all_settings', 'USAGE')
        THEN current_setting('data_directory') END AS database
""")


async def list_waiting(session: ReadSession, run_id: str | None, *, cursor: str | None, limit: int) -> WaitingPage:
    """Rollouts that wait for feedback, those that ended first at the beginning. Args: run_id: None: of all runs"""
    name = f"feedback {run_id or ''}"
    after, after_id = decode_cursor(cursor, name, datetime, str) or (None, None)
    values = {"run_id": run_id, "after": after, "after_id": after_id, "limit": limit + 1}
    sizes = {"task_characters": TASK_CHARACTERS, "output_characters": OUTPUT_CHARACTERS}
    rows = (await session.execute(_WAITING, {**values, **sizes})).all()
    found = page(
        name,
        rows,
        limit,
        lambda row: WaitingRollout(
            **{field: getattr(row, field) for field in WaitingRollout.model_fields if field != "missing"},
            missing=[MissingFeedback.model_validate(one) for one in row.missing],
        ),
        lambda row: (row.since, row.rollout_id),
    )
    total = None if cursor is not None else (await count_waiting(session, run_id))[0]
    return WaitingPage(items=found.items, next_cursor=found.next_cursor, total=total)


async def count_waiting(session: ReadSession, run_id: str | None = None) -> tuple[int, int]:
    """Ended attempts that wait for feedback, and those that a grader may take or has."""
    row = (await session.execute(_COUNTS, {"run_id": run_id})).one()
    return row.feedback, row.grades


async def read_platform(session: ReadSession) -> Platform:
    """The services as the database sees them, and the counts of work and bytes."""
    names = {f"leyden-{name}": name for name in SERVICES}
    rows = {names[row.name]: row for row in await session.execute(_SERVICES, {"names": list(names)})}
    queued, live = await count_work(session)
    feedback, grades = await count_waiting(session)
    size = (await session.execute(_BYTES)).one()
    return Platform(
        services=[
            ServiceState(
                name=name,
                connections=rows[name].connections if name in rows else 0,
                active_at=rows[name].active_at if name in rows else None,
            )
            for name in SERVICES
        ],
        queued_rollouts=queued,
        live_attempts=live,
        waiting_grades=grades,
        waiting_feedback=feedback,
        database_bytes=size.database,
        weights_bytes=size.weights,
    )


async def folders_written(session: ReadSession) -> tuple[str | None, str | None]:
    """The folders of the newest trained version and of a Postgres on this machine; None where they are not known."""
    row = (await session.execute(_FOLDERS)).one()
    return row.versions, row.database
