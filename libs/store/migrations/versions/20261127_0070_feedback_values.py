"""The values of each feedback component for which rollouts wait."""

from alembic import op

revision = "20261127_0070"
down_revision = "20261127_0069"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "ALTER TABLE runs ADD COLUMN feedback_values integer"
        " GENERATED ALWAYS AS ((config #>> '{reward,wait,values}')::integer) STORED"
    )


def downgrade() -> None:
    op.execute("ALTER TABLE runs DROP COLUMN feedback_values")
