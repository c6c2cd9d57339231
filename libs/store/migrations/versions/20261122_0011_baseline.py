"""The first schema: `baseline.sql`. It replaces the revisions up to 20261122_0011, which no release had."""

from pathlib import Path

from alembic import op

revision = "20261122_0011"
down_revision = None
branch_labels = None
depends_on = None

BASELINE = Path(__file__).parents[1] / "baseline.sql"


def upgrade() -> None:
    # Without parameters the driver accepts many statements at once and leaves per cent signs alone.
    op.get_bind().exec_driver_sql(BASELINE.read_text(), execution_options={"no_parameters": True})


def downgrade() -> None:
    """Raises: RuntimeError: nothing comes before the baseline"""
    raise RuntimeError("nothing comes before the baseline: drop the database instead")
