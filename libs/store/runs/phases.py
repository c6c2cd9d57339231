"""Phases of runs: the controller writes them, ends open work, and reads the reasons to end a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import text

from leyden.libs.contracts.states import RunPhase
from leyden.libs.store.database import ReadSession, Session
from leyden.libs.store.policies import policies_by_id
from leyden.libs.store.rewards import KNOWN_REWARD, SIBLING


@dataclass(frozen=True)
class Phase:
    """The next phase of a run."""

    run_id: str
    phase: RunPhase
    reason: str | None


_CANCEL_ROLLOUTS = text("""
    UPDATE rollouts SET state = 'cancelled', reason = :reason, finished_at = now()
    WHERE state = 'queued' AND run_id = ANY(:runs)
""")

_CANCEL_GROUPS = text("""
    UPDATE groups SET state = 'cancelled', finished_at = now() WHERE state = 'open' AND run_id = ANY(:runs)
""")

_STOP_ROLLOUTS = text("""
    UPDATE rollouts r SET state = 'cancelled', reason = 'training stopped early', finished_at = now()
    FROM groups g WHERE g.id = r.group_id AND g.evaluation_id IS NULL AND r.state = 'queued' AND r.run_id = :run
""")

_STOP_GROUPS = text("""
    UPDATE groups SET state = 'cancelled', finished_at = now()
    WHERE state = 'open' AND evaluation_id IS NULL AND run_id = :run
""")

_STEP_REWARDS = text(f"""
    SELECT s.step, avg({KNOWN_REWARD})
    FROM step_groups s JOIN rollouts ON rollouts.group_id = s.group_id AND rollouts.state = 'finished'
        AND {SIBLING}
    WHERE s.run_id = :run AND s.step IS NOT NULL GROUP BY 1 HAVING count({KNOWN_REWARD}) > 0 ORDER BY 1
""")  # noqa: S608  # constants alone

_STOP_REASON = text("UPDATE run_status SET stop_reason = :reason WHERE run_id = :run AND stop_reason IS NULL")

_PHASES = text("""
    INSERT INTO run_status AS s (run_id, phase, reason, reason_since, started_at, finished_at)
    SELECT v.id, v.phase, v.reason, CASE WHEN v.reason IS NOT NULL THEN now() END,
           CASE WHEN v.phase IN ('running', 'evaluating') THEN now() END,
           CASE WHEN v.phase IN ('completed', 'failed', 'cancelled') THEN now() END
    FROM unnest(CAST(:ids AS text[]), CAST(:phases AS text[]), CAST(:reasons AS text[])) AS v (id, phase, reason)
    ON CONFLICT (run_id) DO UPDATE SET
        phase = excluded.phase, reason = excluded.reason, finished_at = excluded.finished_at,
        reason_since = CASE WHEN s.reason = excluded.reason THEN s.reason_since ELSE excluded.reason_since END,
        started_at = coalesce(s.started_at, excluded.started_at),
        updated_at = CASE WHEN s.phase = excluded.phase THEN s.updated_at ELSE now() END
""")

# Over rollout r: the cause of its end, for people.
_LATEST = """LEFT JOIN LATERAL (
        SELECT concat_ws(': ', coalesce(nullif(r.reason, 'succeeded'), o.kind), d.reason, o.detail,
                         nullif(right(o.stderr_tail, 500), '')) AS detail
        FROM outcomes o LEFT JOIN gradings d ON d.rollout_id = o.rollout_id AND d.attempt = o.attempt
        WHERE o.rollout_id = r.id ORDER BY o.attempt DESC LIMIT 1
    ) latest ON true"""

# A run whose groups never had a success ends after all its groups, where it has fewer than the limit. Otherwise the
# groups of the present phase count, so that a resumed run has a chance.
_WITHOUT_SUCCESS = text(f"""
    SELECT s.run_id, (array_agg(latest.detail ORDER BY r.finished_at DESC))[1] AS detail
    FROM run_status s
    JOIN runs u ON u.id = s.run_id
    CROSS JOIN LATERAL (SELECT least(:groups, greatest(1, u.steps::bigint * u.groups_per_step)) AS groups) AS needed
    CROSS JOIN LATERAL (
        SELECT NOT EXISTS (
            SELECT FROM groups g JOIN rollouts o ON o.group_id = g.id
            WHERE g.run_id = s.run_id AND g.evaluation_id IS NULL AND o.reason = 'succeeded') AS always
    ) AS failed
    CROSS JOIN LATERAL (
        SELECT id FROM groups g
        WHERE g.run_id = s.run_id AND g.evaluation_id IS NULL AND g.state = 'complete'
            AND (failed.always OR g.created_at >= s.updated_at)
        ORDER BY number DESC LIMIT :groups
    ) g
    JOIN rollouts r ON r.group_id = g.id
    {_LATEST}
    WHERE s.phase = 'running'
    GROUP BY s.run_id, needed.groups
    HAVING count(DISTINCT g.id) >= needed.groups AND NOT bool_or(r.reason = 'succeeded')
""")  # noqa: S608  # constants alone

# A run without steps has the groups of its evaluations alone.
_EVALUATED_WITHOUT_SUCCESS = text(f"""
    SELECT s.run_id, (array_agg(latest.detail ORDER BY r.finished_at DESC))[1] AS detail
    FROM run_status s
    JOIN runs u ON u.id = s.run_id AND u.steps = 0
    CROSS JOIN LATERAL (
        SELECT least(:groups, sum(e.agents * least(d.task_count, coalesce(e.max_tasks, d.task_count)))) AS groups
        FROM evaluations e JOIN datasets d ON d.id = e.dataset_id WHERE e.run_id = s.run_id
    ) AS needed
    JOIN groups g ON g.run_id = s.run_id AND g.evaluation_id IS NOT NULL AND g.state = 'complete'
    JOIN rollouts r ON r.group_id = g.id
    {_LATEST}
    WHERE s.phase IN ('running', 'evaluating')
    AND NOT EXISTS (SELECT FROM rollouts o WHERE o.run_id = s.run_id AND o.reason = 'succeeded')
    GROUP BY s.run_id, needed.groups
    HAVING count(DISTINCT g.id) >= needed.groups
""")  # noqa: S608  # constants alone

# The groups of the present phase count, so that a resumed run has a chance.
_EXCLUDED_BY_CREDIT = text("""
    SELECT s.run_id, newest.groups, newest.reason
    FROM run_status s
    CROSS JOIN LATERAL (
        SELECT count(*) AS groups, bool_and(verdict = 'excluded') AS excluded,
               (array_agg(reason ORDER BY created_at DESC))[1] AS reason
        FROM (SELECT verdict, reason, created_at FROM group_credits
              WHERE run_id = s.run_id AND created_at >= s.updated_at
              ORDER BY created_at DESC LIMIT :groups) AS last
    ) newest
    WHERE s.phase = 'running' AND newest.groups >= :groups AND newest.excluded
        AND EXISTS (SELECT FROM runs u WHERE u.id = s.run_id AND u.algorithm IS DISTINCT FROM 'sft')
    UNION ALL
    -- Fine-tuning has all of its groups at once, and gets no others.
    SELECT s.run_id, NULL, (array_agg(c.reason ORDER BY c.created_at DESC))[1]
    FROM run_status s JOIN runs u ON u.id = s.run_id AND u.algorithm = 'sft'
    JOIN group_credits c ON c.run_id = s.run_id
    WHERE s.phase = 'running' GROUP BY s.run_id HAVING bool_and(c.verdict = 'excluded')
""")


async def causes_of_runs(session: ReadSession, causes: Mapping[str, str]) -> dict[str, str]:
    """The failures of the runs one of whose further policies failed.

    Args: causes: failures by policy
    """
    failed = await policies_by_id(session, causes)
    return {one.run_id: f"policy {one.name}: {causes[one.id]}" for one in failed.values() if not one.is_own}


async def write_phases(session: Session, phases: Sequence[Phase]) -> None:
    """Moves runs to their next phases; `started_at` is the first start of work, `finished_at` the last end."""
    if not phases:
        return
    columns = {
        "ids": [one.run_id for one in phases],
        "phases": [str(one.phase) for one in phases],
        "reasons": [one.reason for one in phases],
    }
    await session.execute(_PHASES, columns)


async def cancel_open_work(session: Session, run_ids: Sequence[str], reason: str) -> None:
    """Cancels queued rollouts and open groups of runs; runners notice at their next heartbeat."""
    await session.execute(_CANCEL_ROLLOUTS, {"runs": list(run_ids), "reason": reason})
    await session.execute(_CANCEL_GROUPS, {"runs": list(run_ids)})


async def cancel_training(session: Session, run_id: str) -> None:
    """Cancels queued rollouts and open groups of training; evaluations go on."""
    await session.execute(_STOP_ROLLOUTS, {"run": run_id})
    await session.execute(_STOP_GROUPS, {"run": run_id})


async def store_stop_reason(session: Session, run_id: str, reason: str) -> None:
    """Decides that training stops early, for good; a run that has a reason keeps it."""
    await session.execute(_STOP_REASON, {"run": run_id, "reason": reason})


async def step_rewards(session: ReadSession, run_id: str) -> list[tuple[int, float]]:
    """Steps with the mean rewards of their rollouts, in their order; none of which all are still to come."""
    return [(step, reward) for step, reward in await session.execute(_STEP_REWARDS, {"run": run_id})]


async def runs_without_success(session: ReadSession, groups: int) -> dict[str, str]:
    """Running runs without a success in their last `groups` training groups of this phase, with the last cause.

    Those without steps have none in all of their evaluations, or in the first `groups` groups of them.
    """
    rows = [
        row
        for statement in (_WITHOUT_SUCCESS, _EVALUATED_WITHOUT_SUCCESS)
        for row in await session.execute(statement, {"groups": groups})
    ]
    return {row.run_id: row.detail or "every lease was lost" for row in rows}


async def runs_excluded_by_credit(session: ReadSession, groups: int) -> dict[str, tuple[int | None, str]]:
    """Running runs whose last `groups` groups of this phase credit excluded, with their number and the last cause; and
    fine-tunings of which it excluded every group, without a number."""
    rows = await session.execute(_EXCLUDED_BY_CREDIT, {"groups": groups})
    return {row.run_id: (row.groups, row.reason) for row in rows}
