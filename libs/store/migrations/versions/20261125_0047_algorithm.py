"""The type of a run's algorithm, by which credit finds the runs that await demonstrations."""

from alembic import op

revision = "20261125_0047"
down_revision = "20261125_0046"
branch_labels = None
depends_on = None


def upgrade() -> None:
    rule = "text GENERATED ALWAYS AS (config #>> '{algorithm,type}') STORED"
    op.execute(f"ALTER TABLE runs ADD COLUMN algorithm {rule}")


def downgrade() -> None:
    op.execute("ALTER TABLE runs DROP COLUMN algorithm")
