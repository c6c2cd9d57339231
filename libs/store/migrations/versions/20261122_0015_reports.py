"""The schema `reports`: views made for people and Grafana, which every role of the database may read."""

from pathlib import Path

from alembic import op

revision = "20261122_0015"
down_revision = "20261122_0014"
branch_labels = None
depends_on = None

REPORTS = Path(__file__).parents[1] / "reports.sql"


def upgrade() -> None:
    # Without parameters the driver accepts many statements at once and leaves per cent signs alone.
    op.get_bind().exec_driver_sql(REPORTS.read_text(), execution_options={"no_parameters": True})


def downgrade() -> None:
    op.execute("DROP SCHEMA reports CASCADE")
