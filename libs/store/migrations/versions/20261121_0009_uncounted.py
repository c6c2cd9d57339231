"""Rollouts that ended without a result have an index: how far a run is, is asked again and again, and was counted by
reading all that it ever sampled."""

import sqlalchemy as sa
from alembic import op

revision = "20261121_0009"
down_revision = "20261121_0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index(
        "ix_rollouts_uncounted", "rollouts", ["run_id"], postgresql_where=sa.text("state IN ('excluded', 'cancelled')")
    )


def downgrade() -> None:
    op.drop_index("ix_rollouts_uncounted", "rollouts")
