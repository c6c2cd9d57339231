"""Objects of a conversation are ordered by the store, not by the clocks of gateways; a run is not pruned before each of
its agents has done its tasks of an evaluation."""

from alembic import op

revision = "20261129_0098"
down_revision = "20261129_0096"
branch_labels = None
depends_on = None

POSITION = "COMMENT ON COLUMN agent_objects.position IS '{}'"
TASKS = "least(d.task_count, e.max_tasks)"


def upgrade() -> None:
    op.execute(POSITION.format("Grows with each item of its owner, and orders them."))
    _replace_in_prune_run(TASKS, f"e.agents * {TASKS}")


def downgrade() -> None:
    _replace_in_prune_run(f"e.agents * {TASKS}", TASKS)
    op.execute(POSITION.format("Nanoseconds since the epoch: orders the items."))


def _replace_in_prune_run(old: str, new: str) -> None:
    op.execute(
        f"DO $do$ BEGIN EXECUTE replace(pg_get_functiondef('prune_run'::regproc), $${old}$$, $${new}$$); END $do$"
    )
