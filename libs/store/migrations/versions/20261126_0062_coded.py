"""Whether code of the operator's own grades the rollouts of a run, and trials of graders."""

from alembic import op

revision = "20261126_0062"
down_revision = "20261126_0061"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "ALTER TABLE runs ADD COLUMN coded boolean NOT NULL GENERATED ALWAYS AS (jsonb_path_exists("
        """config, '$.reward.components[*].grader.type ? (@ == "python" || @ == "command")')) STORED"""
    )
    op.execute(
        "CREATE TABLE grading_trials (id text NOT NULL, rollout_id text NOT NULL, reward jsonb NOT NULL,"
        " expires_at timestamptz NOT NULL, leased_at timestamptz, answer jsonb,"
        " created_at timestamptz NOT NULL DEFAULT now(),"
        " CONSTRAINT pk_grading_trials PRIMARY KEY (id))"
    )


def downgrade() -> None:
    op.execute("DROP TABLE grading_trials")
    op.execute("ALTER TABLE runs DROP COLUMN coded")
