"""The endpoint that did not answer while an attempt ran: one without a reward is then the platform's failure."""

from alembic import op

revision = "20261127_0073"
down_revision = "20261127_0072"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE outcomes ADD COLUMN endpoint_down text")
    op.execute(
        "COMMENT ON COLUMN outcomes.endpoint_down IS 'The endpoint of the agent, or the store, that did not answer while"
        " an attempt ran that ended well without a reward of its own; null: none, or unknown.'"
    )


def downgrade() -> None:
    op.execute("ALTER TABLE outcomes DROP COLUMN endpoint_down")
