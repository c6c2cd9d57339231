"""Columns of runs that Postgres computes from their documents."""

from alembic import op

revision = "20261125_0041"
down_revision = "20261125_0040"
branch_labels = None
depends_on = None

COLUMNS = {
    "runner_type": "text GENERATED ALWAYS AS (coalesce(config #>> '{runner,type}', 'process'))",
    "steps": "integer GENERATED ALWAYS AS ((config #>> '{training,steps}')::integer)",
    "groups_per_step": "integer GENERATED ALWAYS AS ((config #>> '{sampling,groups_per_step}')::integer)",
    "refills": "integer GENERATED ALWAYS AS (coalesce((config #>> '{sampling,refill_zero_variance}')::integer, 0)"
    " * (config #>> '{sampling,groups_per_step}')::integer)",
    "max_attempts": "integer GENERATED ALWAYS AS (coalesce((config #>> '{sampling,max_attempts}')::integer, 3))",
    "failure_reward": "double precision GENERATED ALWAYS AS (CASE WHEN config #>> '{sampling,agent_failure}' = 'reward'"
    " THEN (config #>> '{sampling,failure_reward}')::double precision END)",
    "baseline": "text GENERATED ALWAYS AS (config #>> '{credit,baseline,type}')",
    "awaits_rewards": "boolean GENERATED ALWAYS AS"
    " (config -> 'reward' IS NULL AND config #>> '{runner,stdout_reward}' = 'false')",
}


def upgrade() -> None:
    op.execute("ALTER TABLE runs " + ", ".join(f"ADD COLUMN {name} {rule} STORED" for name, rule in COLUMNS.items()))


def downgrade() -> None:
    op.execute("ALTER TABLE runs " + ", ".join(f"DROP COLUMN {name}" for name in COLUMNS))
