"""Comments: who writes attempts and outcomes."""

from alembic import op

revision = "20261121_0005"
down_revision = "20261121_0004"
branch_labels = None
depends_on = None

COMMENTS = {
    "attempts": (
        "Writer: runner; controller ends leases that nobody renews; both through libs/queue. One execution of a"
        " rollout, which is also its lease, fenced by `lease_id`.",
        "Writer: runner, through libs/queue. One execution of a rollout, which is also its lease, fenced by"
        " `lease_id`.",
    ),
    "outcomes": (
        "Writer: runner, in the transaction that settles the attempt; controller empties the texts of a pruned run.",
        "Writer: runner, in the transaction that settles the attempt. Pruning the run empties its texts.",
    ),
}


def upgrade() -> None:
    """Names both."""
    for table, (comment, earlier) in COMMENTS.items():
        op.create_table_comment(table, comment, existing_comment=earlier)


def downgrade() -> None:
    """Names one."""
    for table, (comment, earlier) in COMMENTS.items():
        op.create_table_comment(table, earlier, existing_comment=comment)
