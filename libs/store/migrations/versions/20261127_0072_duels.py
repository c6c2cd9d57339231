"""The rollout that a trial compares another one with."""

from alembic import op

revision = "20261127_0072"
down_revision = "20261127_0071"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE grading_trials ADD COLUMN against text")


def downgrade() -> None:
    op.execute("ALTER TABLE grading_trials DROP COLUMN against")
