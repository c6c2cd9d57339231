"""A run says since when it has its present reason: an alarm about one needs more than a moment of it."""

import sqlalchemy as sa
from alembic import op

revision = "20261130_0099"
down_revision = "20261129_0098"
branch_labels = None
depends_on = None

COMMENT = "When the present reason began; null without one, and for one of an earlier version."


def upgrade() -> None:
    op.add_column("run_status", sa.Column("reason_since", sa.DateTime(timezone=True), comment=COMMENT))


def downgrade() -> None:
    op.drop_column("run_status", "reason_since")
