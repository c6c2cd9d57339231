"""Calls that a grammar constrained may train without the tokens that it forced."""

import sqlalchemy as sa
from alembic import op

revision = "20261123_0019"
down_revision = "20261123_0017"
branch_labels = None
depends_on = None

COMMENT = "True when a grammar constrained the answer and tokens that it left no choice do not train."


def upgrade() -> None:
    op.add_column(
        "model_calls",
        sa.Column("masks_forced", sa.Boolean(), server_default="false", nullable=False, comment=COMMENT),
    )


def downgrade() -> None:
    op.drop_column("model_calls", "masks_forced")
