"""The money that a run's judges have cost, and the most that they may cost."""

from alembic import op

revision = "20261127_0071"
down_revision = "20261127_0070"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "ALTER TABLE runs ADD COLUMN judge_cost double precision"
        " GENERATED ALWAYS AS ((config #>> '{reward,judge_cost}')::double precision) STORED"
    )
    # No price was known to the tokens of before.
    op.execute("ALTER TABLE judge_usage ADD COLUMN cost double precision, ADD COLUMN unpriced_tokens bigint")
    op.execute("UPDATE judge_usage SET cost = 0, unpriced_tokens = tokens")
    op.execute("ALTER TABLE judge_usage ALTER COLUMN cost SET NOT NULL, ALTER COLUMN unpriced_tokens SET NOT NULL")


def downgrade() -> None:
    op.execute("ALTER TABLE judge_usage DROP COLUMN cost, DROP COLUMN unpriced_tokens")
    op.execute("ALTER TABLE runs DROP COLUMN judge_cost")
