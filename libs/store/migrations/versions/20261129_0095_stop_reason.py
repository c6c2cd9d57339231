"""The decision to stop training early stays: rewards that change later would make another one."""

import sqlalchemy as sa
from alembic import op

revision = "20261129_0095"
down_revision = "20261129_0094"
branch_labels = None
depends_on = None

COMMENT = "Why training stopped early; it stays once it is decided. Null: not decided."


def upgrade() -> None:
    op.add_column("run_status", sa.Column("stop_reason", sa.Text, comment=COMMENT))


def downgrade() -> None:
    op.drop_column("run_status", "stop_reason")
