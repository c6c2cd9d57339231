"""Feedback: values that people and other programs give to components of a reward, which rollouts wait for."""

from alembic import op

revision = "20261125_0046"
down_revision = "20261125_0045"
branch_labels = None
depends_on = None

COLUMNS = {
    "feedback_components": "jsonb GENERATED ALWAYS AS (jsonb_path_query_array("
    """config, '$."reward"."components"[*]?(@."from" == "feedback")."name"'::jsonpath))""",
    "feedback_seconds": "double precision GENERATED ALWAYS AS ((config #>> '{reward,wait,seconds}')::double precision)",
}


def upgrade() -> None:
    op.execute("ALTER TABLE runs " + ", ".join(f"ADD COLUMN {name} {rule} STORED" for name, rule in COLUMNS.items()))
    op.execute(
        "CREATE TABLE feedback ("
        " rollout_id text NOT NULL, key text NOT NULL, attempt integer NOT NULL, run_id text NOT NULL,"
        " component text NOT NULL, value double precision NOT NULL, comment text, token_name text,"
        " created_at timestamptz NOT NULL DEFAULT clock_timestamp(),"
        " CONSTRAINT pk_feedback PRIMARY KEY (rollout_id, key),"
        " CONSTRAINT fk_feedback_rollout_id_rollouts FOREIGN KEY (rollout_id) REFERENCES rollouts (id),"
        " CONSTRAINT ck_feedback_value_finite CHECK (value > '-Infinity' AND value < 'Infinity'))"
    )
    op.execute("CREATE INDEX ix_feedback_run_id ON feedback (run_id)")
    op.execute(
        "CREATE TRIGGER feedback_append_only BEFORE UPDATE OR DELETE ON feedback"
        " FOR EACH ROW EXECUTE FUNCTION refuse_change()"
    )


def downgrade() -> None:
    op.execute("DROP TABLE feedback")
    op.execute("ALTER TABLE runs " + ", ".join(f"DROP COLUMN {name}" for name in COLUMNS))
