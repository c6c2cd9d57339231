"""The agent of a group, where a run has several, and the number of agents that play each task of an evaluation."""

from alembic import op

revision = "20261127_0083"
down_revision = "20261127_0082c"
branch_labels = None
depends_on = None

COMMENTS = {
    "groups.agent": "The one of the run''s agents that plays it, by name; null for the agent of a run that has one.",
    "groups.runner_type": "runner.type of its agent; null for that of the run, as in groups of an earlier version.",
    "evaluations.agents": "Agents of the run, each of which plays each task in a group of its own.",
}


def upgrade() -> None:
    op.execute("ALTER TABLE groups ADD COLUMN agent text, ADD COLUMN runner_type text")
    op.execute("ALTER TABLE evaluations ADD COLUMN agents integer NOT NULL DEFAULT 1")
    for column, comment in COMMENTS.items():
        op.execute(f"COMMENT ON COLUMN {column} IS '{comment}'")


def downgrade() -> None:
    op.execute("ALTER TABLE evaluations DROP COLUMN agents")
    op.execute("ALTER TABLE groups DROP COLUMN agent, DROP COLUMN runner_type")
