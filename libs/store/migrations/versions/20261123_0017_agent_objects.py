"""Objects that agents store through the Responses API: conversations with their items, and marks of deleted responses."""

import sqlalchemy as sa
from alembic import op

revision = "20261123_0017"
down_revision = "20261123_0016"
branch_labels = None
depends_on = None

COMMENT = (
    "Writer: gateway. One object that the agent of an attempt stores by the Responses API: a conversation, an item of"
    " one, or the mark of a deleted response. A repeat changes nothing. Pruning deletes a run's rows."
)
# Pruning a run removes what its agents said, here too.
DELETE = "DELETE FROM agent_objects WHERE run_id = ended;\n    RETURN freed;"
RETURN = "RETURN freed;"


def upgrade() -> None:
    op.create_table(
        "agent_objects",
        sa.Column("run_id", sa.Text(), nullable=False, comment="The run of the rollout."),
        sa.Column("rollout_id", sa.Text(), nullable=False, comment="From the path that the agent called."),
        sa.Column("attempt", sa.Integer(), nullable=False, comment="From the path that the agent called."),
        sa.Column("owner_id", sa.Text(), nullable=False, comment="The conversation of an item; else its own id."),
        sa.Column("id", sa.Text(), nullable=False, comment="The id that the agent sees."),
        sa.Column(
            "position", sa.BigInteger(), nullable=False, comment="Nanoseconds since the epoch: orders the items."
        ),
        sa.Column(
            "document", sa.JSON(none_as_null=True), nullable=True, comment="As the agent sees it; null once deleted."
        ),
        sa.PrimaryKeyConstraint("run_id", "rollout_id", "attempt", "owner_id", "id", name="pk_agent_objects"),
        comment=COMMENT,
    )
    _replace_in_prune_run(RETURN, DELETE)


def downgrade() -> None:
    _replace_in_prune_run(DELETE, RETURN)
    op.drop_table("agent_objects")


def _replace_in_prune_run(old: str, new: str) -> None:
    op.execute(
        f"DO $do$ BEGIN EXECUTE replace(pg_get_functiondef('prune_run'::regproc), $${old}$$, $${new}$$); END $do$"
    )
