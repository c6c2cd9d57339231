"""Objects of a conversation are ordered by the store, not by the clocks of gateways; a run is not pruned before each of
its agents has done its tasks of an evaluation; answers to creates go with their run."""

from alembic import op

revision = "20261129_0098"
down_revision = "20261129_0096"
branch_labels = None
depends_on = None

POSITION = "COMMENT ON COLUMN agent_objects.position IS '{}'"
COMMENTS = {
    "TABLE idempotency_keys": "Writer: api. The answer to a create request: a repeat gets it again and makes no second"
    " row. The controller deletes it after a week.",
    "COLUMN idempotency_keys.run_id": "The run that the answer is of, which takes the row along when it is deleted;"
    " null for datasets, tokens and rows of an earlier version.",
}
TASKS = "least(d.task_count, e.max_tasks)"


def upgrade() -> None:
    op.execute(POSITION.format("Grows with each item of its owner, and orders them."))
    op.execute("ALTER TABLE idempotency_keys ADD COLUMN run_id text")
    for column in ("run_id", "created_at"):
        op.execute(f"CREATE INDEX ix_idempotency_keys_{column} ON idempotency_keys ({column})")
    for name, comment in COMMENTS.items():
        op.execute(f"COMMENT ON {name} IS '{comment}'")
    _replace_in_prune_run(TASKS, f"e.agents * {TASKS}")


def downgrade() -> None:
    _replace_in_prune_run(f"e.agents * {TASKS}", TASKS)
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
