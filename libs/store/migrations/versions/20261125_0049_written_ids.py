"""The answers of other providers in the tokens of the run's own model."""

from alembic import op

revision = "20261125_0049"
down_revision = "20261125_0048"
branch_labels = None
depends_on = None

COMMENT = (
    "int32: the answer of another provider, in the tokens of the run''s own model as its template writes it; null where"
    " an engine sampled, or the template cannot."
)


def upgrade() -> None:
    op.execute("ALTER TABLE model_calls ADD COLUMN written_ids bytea")
    op.execute(f"COMMENT ON COLUMN model_calls.written_ids IS '{COMMENT}'")


def downgrade() -> None:
    op.execute("ALTER TABLE model_calls DROP COLUMN written_ids")
