"""Re-rolls: rollouts that repeat the first calls of another one."""

from alembic import op

revision = "20261127_0085"
down_revision = "20261127_0084"
branch_labels = None
depends_on = None

COMMENTS = {
    "rerolls_of": "The rollout of its group whose first calls it repeats from the record, as a baseline; null: a sibling.",
    "from_call": "The first call, from 0, that a re-roll samples anew; null for a sibling.",
}


def upgrade() -> None:
    op.execute("ALTER TABLE rollouts ADD COLUMN rerolls_of text, ADD COLUMN from_call integer")
    for column, comment in COMMENTS.items():
        op.execute(f"COMMENT ON COLUMN rollouts.{column} IS '{comment}'")


def downgrade() -> None:
    op.execute("ALTER TABLE rollouts DROP COLUMN from_call, DROP COLUMN rerolls_of")
