"""Objects of a conversation are ordered by the store, not by the clocks of gateways; a run is not pruned before each of
its agents has done its tasks of an evaluation; a run stays with the model with which it began, and answers to creates
go with their run."""

from alembic import op

revision = "20261129_0098"
down_revision = "20261129_0097"
branch_labels = None
depends_on = None

POSITION = "COMMENT ON COLUMN agent_objects.position IS '{}'"
COMMENTS = {
    "TABLE idempotency_keys": "Writer: api. The answer to a create request: a repeat gets it again and makes no second"
    " row. The controller deletes it after a week.",
    "COLUMN idempotency_keys.run_id": "The run that the answer is of, which takes the row along when it is deleted;"
    " null for datasets, tokens and rows of an earlier version.",
}
BASE_MODELS = {
    "TABLE base_models": "Writer: trainer. The model with which a run began, in one transaction with version 0: the run"
    " stays with it, whatever pools and settings name later.",
    "COLUMN base_models.run_id": "The run, or a further policy of one.",
    "COLUMN base_models.path": "Folder of the model; of a continued run that of its parent, whose version is a copy.",
    "COLUMN base_models.created_at": "The start of the transaction that wrote the row.",
}
# Version 0 is the base model itself, or a copy of a parent's version in a folder of the run.
BEGAN = """
    INSERT INTO base_models (run_id, path)
    WITH RECURSIVE began AS (
        SELECT run_id, path FROM policy_versions
        WHERE version = 0 AND path NOT LIKE '%/' || run_id || '/versions/0'
        UNION ALL
        SELECT v.run_id, began.path
        FROM began JOIN runs r ON r.parent_run_id = began.run_id
        JOIN policy_versions v ON v.run_id = r.id AND v.version = 0 AND v.path LIKE '%/' || v.run_id || '/versions/0')
    SELECT run_id, path FROM began
"""
TASKS = "least(d.task_count, e.max_tasks)"


def upgrade() -> None:
    op.execute(POSITION.format("Grows with each item of its owner, and orders them."))
    op.execute("ALTER TABLE idempotency_keys ADD COLUMN run_id text")
    for column in ("run_id", "created_at"):
        op.execute(f"CREATE INDEX ix_idempotency_keys_{column} ON idempotency_keys ({column})")
    for name, comment in COMMENTS.items():
        op.execute(f"COMMENT ON {name} IS '{comment}'")
    op.execute("""
        CREATE TABLE base_models (
            run_id text NOT NULL,
            path text NOT NULL,
            created_at timestamptz DEFAULT now() NOT NULL,
            CONSTRAINT pk_base_models PRIMARY KEY (run_id),
            CONSTRAINT fk_base_models_run_id_runs FOREIGN KEY (run_id) REFERENCES runs(id) ON DELETE CASCADE
        )
    """)
    for name, comment in BASE_MODELS.items():
        op.execute(f"COMMENT ON {name} IS '{comment}'")
    op.execute(BEGAN)
    _replace_in_prune_run(TASKS, f"e.agents * {TASKS}")


def downgrade() -> None:
    _replace_in_prune_run(f"e.agents * {TASKS}", TASKS)
    op.execute("DROP TABLE base_models")
    op.execute("DROP INDEX ix_idempotency_keys_created_at")
    op.execute("ALTER TABLE idempotency_keys DROP COLUMN run_id")
    op.execute(
        "COMMENT ON TABLE idempotency_keys IS 'Writer: api. The answer to a create request: a repeat gets it again and"
        " makes no second row.'"
    )
    op.execute(POSITION.format("Nanoseconds since the epoch: orders the items."))


def _replace_in_prune_run(old: str, new: str) -> None:
    op.execute(
        f"DO $do$ BEGIN EXECUTE replace(pg_get_functiondef('prune_run'::regproc), $${old}$$, $${new}$$); END $do$"
    )
