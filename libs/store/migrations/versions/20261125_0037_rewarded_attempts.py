"""External rewards of a model call count with its attempt alone."""

from alembic import op

revision = "20261125_0037"
down_revision = "20261125_0036"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE external_rewards ADD COLUMN attempt integer")
    op.execute(
        "COMMENT ON COLUMN external_rewards.attempt IS 'The attempt that made the call: the reward counts if that attempt"
        " does. Null for the rollout.'"
    )


def downgrade() -> None:
    op.execute("ALTER TABLE external_rewards DROP COLUMN attempt")
