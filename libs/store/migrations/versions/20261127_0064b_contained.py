"""Whether containers grade the rollouts of a run."""

from alembic import op

revision = "20261127_0064b"
down_revision = "20261127_0064"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "ALTER TABLE runs ADD COLUMN contained boolean NOT NULL GENERATED ALWAYS AS (jsonb_path_exists("
        """config, '$.reward.components[*].grader.type ? (@ == "container")')) STORED"""
    )


def downgrade() -> None:
    op.execute("ALTER TABLE runs DROP COLUMN contained")
