"""Samples name the calls that they train, with their rewards, for a critic. Samples of before name none."""

from alembic import op

revision = "20261123_0024"
down_revision = "20261123_0023"
branch_labels = None
depends_on = None

COMMENT = "For a critic: [{id, parent, reward, share, begin, end}] of the calls that this row trains; else null."


def upgrade() -> None:
    # A credit worker of before writes no value during a rolling update.
    op.execute("ALTER TABLE samples ADD calls jsonb")
    op.execute(f"COMMENT ON COLUMN samples.calls IS '{COMMENT}'")


def downgrade() -> None:
    op.execute("ALTER TABLE samples DROP calls")
