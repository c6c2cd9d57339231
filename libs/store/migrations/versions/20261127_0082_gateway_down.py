"""When the gateway did not answer while an attempt ran: a reward without a later answer is then no verdict."""

from alembic import op

revision = "20261127_0082"
down_revision = "20261127_0079"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE outcomes ADD COLUMN gateway_down_seconds double precision")
    op.execute(
        "COMMENT ON COLUMN outcomes.gateway_down_seconds IS 'How long before the end of an attempt that ended well the"
        " gateway last did not answer; null: it did, or unknown.'"
    )


def downgrade() -> None:
    op.execute("ALTER TABLE outcomes DROP COLUMN gateway_down_seconds")
