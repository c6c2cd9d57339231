"""Whether a model compares the rollouts of a run's groups."""

from alembic import op

revision = "20261126_0057b"
down_revision = "20261126_0057"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "ALTER TABLE runs ADD COLUMN compared boolean NOT NULL GENERATED ALWAYS AS (jsonb_path_exists("
        """config, '$.reward.components[*].grader.type ? (@ == "relative_model")')) STORED"""
    )


def downgrade() -> None:
    op.execute("ALTER TABLE runs DROP COLUMN compared")
