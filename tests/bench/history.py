"""A run with many old groups, which Postgres writes itself: sampled, settled, credited and trained."""

from __future__ import annotations

from typing import Any

import psycopg

GROUPS_A_STEP = 8
SIBLINGS = 2
SECONDS_A_GROUP = 5.0
"""Between the ends of two groups."""

_PAST = (
    """
    INSERT INTO groups (id, run_id, number, dataset_id, task_number, size, admitted_version, state, finished_at)
    SELECT %(run)s || '.' || n, %(run)s, n, r.dataset_id, 0, %(siblings)s, 0, 'complete',
           now() - %(seconds)s * make_interval(secs => %(last)s - n)
    FROM runs r, generate_series(CAST(%(first)s AS integer), %(last)s) n WHERE r.id = %(run)s
    """,
    """
    INSERT INTO rollouts (id, run_id, group_id, sibling, state, attempt, reward, reason, finished_at)
    SELECT g.id || '.' || s, g.run_id, g.id, s, 'finished', 1, s %% 2, 'succeeded', now()
    FROM groups g, generate_series(0, %(siblings)s - 1) s
    WHERE g.run_id = %(run)s AND g.number BETWEEN %(first)s AND %(last)s
    """,
    """
    INSERT INTO attempts (rollout_id, number, run_id, state, lease_id, owner, lease_expires_at, started_at, finished_at)
    SELECT r.id, 1, r.run_id, 'settled', 'lease-' || r.id, 'runner', now(), now(), now()
    FROM groups g JOIN rollouts r ON r.group_id = g.id
    WHERE g.run_id = %(run)s AND g.number BETWEEN %(first)s AND %(last)s
    """,
    """
    INSERT INTO outcomes (rollout_id, attempt, run_id, kind, reward, facts, exit_code, stdout_tail, stderr_tail)
    SELECT r.id, 1, r.run_id, 'succeeded', r.reward, '{"reward": 1}', 0, '{"reward": 1}', ''
    FROM groups g JOIN rollouts r ON r.group_id = g.id
    WHERE g.run_id = %(run)s AND g.number BETWEEN %(first)s AND %(last)s
    """,
    """
    INSERT INTO group_credits (group_id, run_id, verdict, credit_version, counted_siblings, has_variance,
                               min_policy_version, reward_mean, reward_std)
    SELECT id, run_id, 'credited', 1, size, true, 0, 0.5, 0.5
    FROM groups WHERE run_id = %(run)s AND number BETWEEN %(first)s AND %(last)s
    """,
    """
    INSERT INTO steps (run_id, number, metrics, checkpoint, started_at)
    SELECT %(run)s, n, '{"loss": 0.5}', '/nowhere', now()
    FROM generate_series(%(first)s / %(a_step)s + 1, %(last)s / %(a_step)s + 1) n ON CONFLICT DO NOTHING
    """,
    """
    INSERT INTO step_groups (group_id, run_id, step, verdict)
    SELECT id, run_id, number / %(a_step)s + 1, 'trained'
    FROM groups WHERE run_id = %(run)s AND number BETWEEN %(first)s AND %(last)s
    """,
    """
    INSERT INTO policy_versions (run_id, version, path, content_sha256, size_bytes)
    SELECT %(run)s, n, '/nowhere', 'none', 1 FROM generate_series(0, %(last)s / %(a_step)s + 1) n
    ORDER BY n ON CONFLICT DO NOTHING
    """,
)


def add_past(connection: psycopg.Connection[Any], run_id: str, groups: int) -> None:
    """Groups of a run up to the number `groups`, as if it had worked until there; those that exist stay."""
    row = connection.execute("SELECT coalesce(max(number) + 1, 0) FROM groups WHERE run_id = %s", (run_id,)).fetchone()
    assert row is not None
    values = {"run": run_id, "first": row[0], "last": groups - 1, "siblings": SIBLINGS, "a_step": GROUPS_A_STEP}
    values |= {"seconds": SECONDS_A_GROUP}
    with connection.transaction():
        for statement in _PAST:
            connection.execute(statement, values)
