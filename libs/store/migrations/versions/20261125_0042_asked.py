"""Sampling parameters that an agent asked for and its run's `sampling.override` replaced."""

from alembic import op

revision = "20261125_0042"
down_revision = "20261125_0041"
branch_labels = None
depends_on = None

COMMENT = "Sampling parameters as the agent asked, where the run''s override replaced them; null: none."


def upgrade() -> None:
    op.execute("ALTER TABLE model_calls ADD COLUMN asked jsonb")
    op.execute(f"COMMENT ON COLUMN model_calls.asked IS '{COMMENT}'")


def downgrade() -> None:
    op.execute("ALTER TABLE model_calls DROP COLUMN asked")
