"""The smallest reward of a run so far: the most that a failure of its agent may earn."""

from alembic import op

revision = "20261125_0035"
down_revision = "20261125_0034"
branch_labels = None
depends_on = None

COMMENTS = {
    "run_status.smallest_reward": "Over finished rollouts of complete groups whose agent did not fail; null without one.",
    "rollouts.reward": "The outcome''s reward; null unless finished. A failure''s may follow when its group is"
    " complete.",
}
BEFORE = "The outcome''s reward; null unless finished."


def upgrade() -> None:
    op.execute("ALTER TABLE run_status ADD COLUMN smallest_reward double precision")
    op.execute("""
        UPDATE run_status s SET smallest_reward = (
            SELECT min(reward) FROM rollouts
            WHERE run_id = s.run_id AND state = 'finished' AND reason = 'succeeded')
        WHERE phase NOT IN ('completed', 'failed', 'cancelled')
    """)
    for column, comment in COMMENTS.items():
        op.execute(f"COMMENT ON COLUMN {column} IS '{comment}'")


def downgrade() -> None:
    op.execute(f"COMMENT ON COLUMN rollouts.reward IS '{BEFORE}'")
    op.execute("ALTER TABLE run_status DROP COLUMN smallest_reward")
