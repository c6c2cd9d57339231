"""Objects of a conversation are ordered by the store, not by the clocks of gateways."""

from alembic import op

revision = "20261129_0098"
down_revision = "20261129_0096"
branch_labels = None
depends_on = None

POSITION = "COMMENT ON COLUMN agent_objects.position IS '{}'"


def upgrade() -> None:
    op.execute(POSITION.format("Grows with each item of its owner, and orders them."))


def downgrade() -> None:
    op.execute(POSITION.format("Nanoseconds since the epoch: orders the items."))
