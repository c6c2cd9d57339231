"""Calls name their role in the run. Calls of before name none."""

from alembic import op

revision = "20261123_0023"
down_revision = "20261123_0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # A gateway of before writes no value during a rolling update.
    op.execute("ALTER TABLE model_calls ADD role text")
    op.execute("COMMENT ON COLUMN model_calls.role IS 'The role of the run''s document that the call has; null: none.'")


def downgrade() -> None:
    op.execute("ALTER TABLE model_calls DROP role")
