"""Since when an engine serves nothing: one of several that never answers is an alarm."""

from alembic import op

revision = "20261127_0074"
down_revision = "20261127_0073"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE engines ADD COLUMN silent_since timestamptz")
    op.execute(
        "COMMENT ON COLUMN engines.silent_since IS 'Since when it serves no weights; null while it serves some.'"
    )
    op.execute("UPDATE engines SET silent_since = now() WHERE state <> 'serving'")


def downgrade() -> None:
    op.execute("ALTER TABLE engines DROP COLUMN silent_since")
