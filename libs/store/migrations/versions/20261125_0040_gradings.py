"""Rewards by components: gradings as leases with their totals, and the components themselves."""

from alembic import op

revision = "20261125_0040"
down_revision = "20261125_0039"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE rollouts ADD COLUMN grading_attempt integer")
    op.execute(
        "CREATE INDEX ix_rollouts_grading ON rollouts (created_at)"
        " WHERE state = 'queued' AND grading_attempt > excused_attempt"
    )
    op.execute(
        "CREATE TABLE gradings ("
        " rollout_id text NOT NULL, attempt integer NOT NULL, run_id text NOT NULL, tries integer NOT NULL,"
        " lease_id text NOT NULL, owner text NOT NULL, lease_expires_at timestamptz NOT NULL, settled_at timestamptz,"
        " total double precision, reason text, created_at timestamptz NOT NULL DEFAULT now(),"
        " CONSTRAINT pk_gradings PRIMARY KEY (rollout_id, attempt),"
        " CONSTRAINT uq_gradings_lease_id UNIQUE (lease_id),"
        " CONSTRAINT fk_gradings_rollout_id_rollouts FOREIGN KEY (rollout_id) REFERENCES rollouts (id),"
        " CONSTRAINT ck_gradings_total_finite CHECK (total > '-Infinity' AND total < 'Infinity'),"
        " CONSTRAINT ck_gradings_settled_has_total CHECK (settled_at IS NULL OR (total IS NULL) = (reason IS NOT NULL)))"
    )
    op.execute("CREATE INDEX ix_gradings_run_id ON gradings (run_id)")
    op.execute(
        "CREATE TABLE rollout_rewards ("
        " rollout_id text NOT NULL, attempt integer NOT NULL, component text NOT NULL,"
        " revision integer NOT NULL DEFAULT 1, run_id text NOT NULL, position integer NOT NULL, state text NOT NULL,"
        " weight double precision NOT NULL, value double precision, extracted text, explanation text NOT NULL,"
        " source text NOT NULL, duration_seconds double precision NOT NULL,"
        " created_at timestamptz NOT NULL DEFAULT now(),"
        " CONSTRAINT pk_rollout_rewards PRIMARY KEY (rollout_id, attempt, component, revision),"
        " CONSTRAINT fk_rollout_rewards_rollout_id_gradings FOREIGN KEY (rollout_id, attempt)"
        " REFERENCES gradings (rollout_id, attempt),"
        " CONSTRAINT ck_rollout_rewards_state_known CHECK (state IN ('scored', 'not_applicable', 'failed')),"
        " CONSTRAINT ck_rollout_rewards_value_finite CHECK (value > '-Infinity' AND value < 'Infinity'),"
        " CONSTRAINT ck_rollout_rewards_scored_has_value CHECK ((value IS NOT NULL) = (state = 'scored')))"
    )
    op.execute("CREATE INDEX ix_rollout_rewards_run_id ON rollout_rewards (run_id)")


def downgrade() -> None:
    op.execute("DROP TABLE rollout_rewards")
    op.execute("DROP TABLE gradings")
    op.execute("DROP INDEX ix_rollouts_grading")
    op.execute("ALTER TABLE rollouts DROP COLUMN grading_attempt")
