"""The tokens that a run's judges have used, and the most that they may use."""

from alembic import op

revision = "20261127_0064c"
down_revision = "20261127_0064b"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "ALTER TABLE runs ADD COLUMN judge_tokens bigint"
        " GENERATED ALWAYS AS ((config #>> '{reward,judge_tokens}')::bigint) STORED"
    )
    op.execute(
        "CREATE TABLE judge_usage (run_id text NOT NULL, tokens bigint NOT NULL,"
        " CONSTRAINT pk_judge_usage PRIMARY KEY (run_id),"
        " CONSTRAINT fk_judge_usage_run_id_runs FOREIGN KEY (run_id) REFERENCES runs (id))"
    )


def downgrade() -> None:
    op.execute("DROP TABLE judge_usage")
    op.execute("ALTER TABLE runs DROP COLUMN judge_tokens")
