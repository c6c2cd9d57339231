"""The part of each component in its rollout's total."""

from alembic import op

revision = "20261125_0043"
down_revision = "20261125_0042"
branch_labels = None
depends_on = None

COMMENT = "Its part in the total before gates and clip; null for a metric, and where it has none."


def upgrade() -> None:
    op.execute("ALTER TABLE rollout_rewards ADD COLUMN contribution double precision")
    op.execute(f"COMMENT ON COLUMN rollout_rewards.contribution IS '{COMMENT}'")
    op.execute("UPDATE rollout_rewards SET contribution = weight * value WHERE weight <> 0")


def downgrade() -> None:
    op.execute("ALTER TABLE rollout_rewards DROP COLUMN contribution")
