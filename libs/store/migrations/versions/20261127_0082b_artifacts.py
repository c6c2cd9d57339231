"""Files of agents that a run keeps, for graders and people."""

from alembic import op

revision = "20261127_0082b"
down_revision = "20261127_0082"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE outcomes ADD COLUMN artifacts_left_out integer NOT NULL DEFAULT 0")
    op.execute(
        "CREATE TABLE artifacts (rollout_id text NOT NULL, attempt integer NOT NULL, path text NOT NULL,"
        " run_id text NOT NULL, size_bytes bigint NOT NULL, content bytea NOT NULL,"
        " CONSTRAINT pk_artifacts PRIMARY KEY (rollout_id, attempt, path),"
        " CONSTRAINT fk_artifacts_rollout_id_outcomes FOREIGN KEY (rollout_id, attempt)"
        " REFERENCES outcomes (rollout_id, attempt))"
    )
    op.execute("CREATE INDEX ix_artifacts_run_id ON artifacts (run_id)")
    op.execute(
        "CREATE TRIGGER artifacts_append_only BEFORE UPDATE ON artifacts FOR EACH ROW EXECUTE FUNCTION refuse_change()"
    )


def downgrade() -> None:
    op.execute("DROP TABLE artifacts")
    op.execute("ALTER TABLE outcomes DROP COLUMN artifacts_left_out")
