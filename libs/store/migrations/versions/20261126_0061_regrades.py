"""Later gradings of rollouts that were graded already: a total each, and rows of rollout_rewards with their revision."""

from alembic import op

revision = "20261126_0061"
down_revision = "20261126_0060b"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("""
        CREATE TABLE regrades (
            rollout_id text NOT NULL,
            attempt integer NOT NULL,
            revision integer NOT NULL,
            run_id text NOT NULL,
            reward jsonb NOT NULL,
            total double precision NOT NULL,
            token_name text NOT NULL,
            created_at timestamptz NOT NULL DEFAULT now(),
            CONSTRAINT pk_regrades PRIMARY KEY (rollout_id, attempt, revision),
            CONSTRAINT fk_regrades_rollout_id_gradings FOREIGN KEY (rollout_id, attempt)
                REFERENCES gradings (rollout_id, attempt),
            CONSTRAINT ck_regrades_revision_above_first CHECK (revision > 1),
            CONSTRAINT ck_regrades_total_finite CHECK (total > '-Infinity' AND total < 'Infinity')
        )
    """)
    op.execute("CREATE INDEX ix_regrades_run_id ON regrades (run_id)")


def downgrade() -> None:
    op.execute("DELETE FROM rollout_rewards WHERE revision > 1")
    op.execute("DROP TABLE regrades")
