"""Leases of trials: those of a grader that dies are another grader's."""

from alembic import op

revision = "20261127_0077"
down_revision = "20261127_0074"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "ALTER TABLE grading_trials DROP COLUMN leased_at, ADD COLUMN lease_id text, ADD COLUMN lease_expires_at timestamptz,"
        " ADD COLUMN tries integer NOT NULL DEFAULT 0,"
        " ADD CONSTRAINT uq_grading_trials_lease_id UNIQUE (lease_id)"
    )


def downgrade() -> None:
    op.execute(
        "ALTER TABLE grading_trials ADD COLUMN leased_at timestamptz,"
        " DROP COLUMN lease_id, DROP COLUMN lease_expires_at, DROP COLUMN tries"
    )
