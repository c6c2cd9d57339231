"""Runs continue others, and a run that stopped early leaves planned evaluations undone."""

import sqlalchemy as sa
from alembic import op

revision = "20261123_0021"
down_revision = "20261123_0020"
branch_labels = None
depends_on = None

OPEN_EVALUATION = "s.phase = 'completed' AND "
REACHED = (
    "coalesce(e.policy_version, 0) <= coalesce((SELECT max(version) FROM policy_versions WHERE run_id = ended), 0) AND "
)


def upgrade() -> None:
    op.add_column("runs", sa.Column("parent_run_id", sa.Text()))
    op.add_column("runs", sa.Column("parent_version", sa.Integer()))
    op.create_index(
        "ix_step_groups_no_variance",
        "step_groups",
        ["run_id", "step"],
        postgresql_where=sa.text("verdict = 'no_variance'"),
    )
    _replace_in_prune_run(OPEN_EVALUATION, OPEN_EVALUATION + REACHED)


def downgrade() -> None:
    _replace_in_prune_run(OPEN_EVALUATION + REACHED, OPEN_EVALUATION)
    op.drop_index("ix_step_groups_no_variance", "step_groups")
    op.drop_column("runs", "parent_version")
    op.drop_column("runs", "parent_run_id")


def _replace_in_prune_run(old: str, new: str) -> None:
    op.execute(
        f"DO $do$ BEGIN EXECUTE replace(pg_get_functiondef('prune_run'::regproc), $${old}$$, $${new}$$); END $do$"
    )
