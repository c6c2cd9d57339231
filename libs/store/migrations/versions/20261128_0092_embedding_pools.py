"""Pools whose engines embed, and get no weights of runs."""

from alembic import op

revision = "20261128_0092"
down_revision = "20261128_0091"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE pools ADD COLUMN embeddings boolean DEFAULT false NOT NULL")
    op.execute("COMMENT ON COLUMN pools.embeddings IS 'Whether the engines embed, and get no weights of runs.'")


def downgrade() -> None:
    op.execute("ALTER TABLE pools DROP COLUMN embeddings")
