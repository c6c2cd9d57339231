"""Reports have the newest total of rollouts that were graded again, beside the reward that credit had."""

from alembic import op
from sqlalchemy import text

revision = "20261127_0064"
down_revision = "20261126_0062"
branch_labels = None
depends_on = None

_GIVEN = """coalesce((SELECT sum(value) FROM rewards
            WHERE rollout_id = rollouts.id AND attempt = rollouts.attempt), 0)
        + coalesce((SELECT sum(value) FROM external_rewards WHERE rollout_id = rollouts.id), 0)"""
_COLUMNS = f""",
    coalesce(newest.total, rollouts.reward) + {_GIVEN} AS newest_reward, coalesce(newest.revision, 1) AS revision"""
_NEWEST = """
LEFT JOIN LATERAL (
    SELECT regrades.total, regrades.revision FROM regrades
    WHERE regrades.rollout_id = rollouts.id AND regrades.attempt = rollouts.attempt
    ORDER BY regrades.revision DESC LIMIT 1
) AS newest ON true"""


def upgrade() -> None:
    _exec(f"CREATE OR REPLACE VIEW reports.rollouts AS {_rollouts(_COLUMNS, _NEWEST)}")
    _comment("rewards from every source (reward: as credit had it, newest_reward: after its last regrade)")


def downgrade() -> None:
    # No view loses a column in place, and another one reads this one.
    definition, comment = _stored("reports.steps")
    _exec("DROP VIEW reports.steps, reports.rollouts")
    _exec(f"CREATE VIEW reports.rollouts AS {_rollouts('', '')}")
    _comment("reward from every source")
    _exec(f"CREATE VIEW reports.steps AS {definition}")
    _exec(f"COMMENT ON VIEW reports.steps IS '{comment}'")
    _exec("GRANT SELECT ON reports.rollouts, reports.steps TO PUBLIC")


def _rollouts(columns: str, join: str) -> str:
    return f"""
SELECT rollouts.run_id, runs.name AS run_name, rollouts.id AS rollout_id, rollouts.group_id, groups.evaluation_id,
    step_groups.step, rollouts.state, rollouts.reason, rollouts.reward + {_GIVEN} AS reward,
    rollouts.created_at, tried.started_at, rollouts.finished_at, coalesce(tried.attempts, 0) AS attempts,
    extract(epoch FROM tried.started_at - rollouts.created_at)::float8 AS queue_seconds,
    extract(epoch FROM rollouts.finished_at - tried.started_at)::float8 AS work_seconds{columns}
FROM rollouts
JOIN runs ON runs.id = rollouts.run_id
JOIN groups ON groups.id = rollouts.group_id
LEFT JOIN step_groups ON step_groups.group_id = rollouts.group_id AND step_groups.run_id = rollouts.run_id
LEFT JOIN LATERAL (
    SELECT count(*) AS attempts, min(attempts.started_at) AS started_at FROM attempts
    WHERE attempts.rollout_id = rollouts.id
) AS tried ON true{join}"""  # noqa: S608  # constants alone


def _comment(rewards: str) -> None:
    _exec(
        f"COMMENT ON VIEW reports.rollouts IS 'One row for each rollout: its state, its {rewards},"
        " its waiting and working time in seconds.'"
    )


def _stored(view: str) -> tuple[str, str]:
    query = "SELECT pg_get_viewdef(CAST(:view AS regclass), true), obj_description(CAST(:view AS regclass))"
    definition, comment = op.get_bind().execute(text(query), {"view": view}).one()
    return definition.rstrip().removesuffix(";"), comment.replace("'", "''")


def _exec(statement: str) -> None:
    op.get_bind().exec_driver_sql(statement, execution_options={"no_parameters": True})
