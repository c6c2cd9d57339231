"""The cost of a page depends on its rows and not on the length of the run."""

from __future__ import annotations

import psycopg
from sqlalchemy import text

from leyden.libs.store.database import Database
from leyden.libs.store.read import results
from tests.support import builders

GROUPS, SIBLINGS, GROUPS_PER_STEP = 4000, 4, 8
STEPS = GROUPS // GROUPS_PER_STEP

# As ended rollouts, groups and steps would be, but for what no page of steps shows.
_LONG_RUN = """
    SET session_replication_role = replica;
    INSERT INTO groups (id, run_id, number, dataset_id, task_number, size, admitted_version, state)
        SELECT :run || '.' || n, :run, n, 'd', 0, :siblings, 0, 'complete' FROM generate_series(0, :groups - 1) n;
    INSERT INTO rollouts (id, run_id, group_id, sibling, state, attempt, reward)
        SELECT id || '.' || s, :run, id, s, 'finished', 1, s FROM groups, generate_series(0, :siblings - 1) s;
    INSERT INTO outcomes (rollout_id, attempt, run_id, kind, facts, stdout_tail, stderr_tail)
        SELECT id, 1, :run, 'succeeded', '{"turns": 3}', '', '' FROM rollouts;
    INSERT INTO step_groups (group_id, run_id, step, verdict)
        SELECT id, :run, 1 + number / :groups_per_step, 'trained' FROM groups;
    INSERT INTO steps (run_id, number, metrics, checkpoint, started_at)
        SELECT :run, n, '{"loss": 1.5}', 'c', now() FROM generate_series(1, :groups / :groups_per_step) n;
    ANALYZE
"""


def add_long_run(dsn: str, run_id: str) -> None:
    statements = _LONG_RUN.replace(":run", f"'{run_id}'").replace(":groups_per_step", str(GROUPS_PER_STEP))
    statements = statements.replace(":groups", str(GROUPS)).replace(":siblings", str(SIBLINGS))
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in statements.split(";"):
            connection.execute(statement.encode())


async def test_a_page_of_steps_reads_the_rollouts_of_its_groups_and_no_others(
    database: Database, postgres_dsn: str
) -> None:
    run = await builders.add_run(database)
    add_long_run(postgres_dsn, run.id)
    async with database.read() as session:
        page = await results.list_steps(session, run.id, cursor=None, limit=100)
        read = text("SELECT seq_tup_read FROM pg_stat_xact_user_tables WHERE relname = 'rollouts'")
        assert (await session.execute(read)).scalar_one() == 0
    async with database.read() as session:
        metrics = await results.get_metrics(session, run.id, ["reward_mean", "fact.turns"])
    shown = [(step.number, step.groups, step.rollouts, step.reward_mean, step.facts) for step in page.items]
    assert shown == [(1 + n, {"trained": GROUPS_PER_STEP}, 32, 1.5, {"turns": 3.0}) for n in range(100)]
    assert {series.name: [value for _, _, value in series.points] for series in metrics.series} == {
        "reward_mean": [1.5] * STEPS,
        "fact.turns": [3.0] * STEPS,
    }
