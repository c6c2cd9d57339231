"""Whether a model scores the rollouts of a run."""

from alembic import op

revision = "20261125_0048"
down_revision = "20261125_0047"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "ALTER TABLE runs ADD COLUMN judged boolean NOT NULL GENERATED ALWAYS AS (jsonb_path_exists("
        """config, '$.reward.components[*].grader.type ? (@ == "score_model")')) STORED"""
    )


def downgrade() -> None:
    op.execute("ALTER TABLE runs DROP COLUMN judged")
