"""Rollouts that are decoded greedily, as the baseline of their siblings."""

from alembic import op

revision = "20261123_0028"
down_revision = "20261123_0027"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE rollouts ADD COLUMN greedy boolean DEFAULT false NOT NULL")
    op.execute("COMMENT ON COLUMN rollouts.greedy IS 'Decoded greedily: the baseline of its siblings, never trained.'")


def downgrade() -> None:
    op.execute("ALTER TABLE rollouts DROP COLUMN greedy")
