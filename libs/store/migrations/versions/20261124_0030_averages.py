"""The moving averages of a run after each credited group."""

from alembic import op

revision = "20261124_0030"
down_revision = "20261124_0029"
branch_labels = None
depends_on = None

COMMENT = (
    "With baseline ema: the run''s moving averages after this group, by role, or one under the empty name; else null."
)


def upgrade() -> None:
    op.execute("ALTER TABLE group_credits ADD COLUMN averages jsonb")
    op.execute(f"COMMENT ON COLUMN group_credits.averages IS '{COMMENT}'")


def downgrade() -> None:
    op.execute("ALTER TABLE group_credits DROP COLUMN averages")
