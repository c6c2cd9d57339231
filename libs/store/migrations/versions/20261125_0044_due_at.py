"""The moment from which a rollout's next attempt may begin; leases read no bound of attempts any longer."""

from alembic import op

revision = "20261125_0044"
down_revision = "20261125_0043"
branch_labels = None
depends_on = None

MAX_ATTEMPTS = "integer GENERATED ALWAYS AS (coalesce((config #>> '{sampling,max_attempts}')::integer, 3)) STORED"
COMMENT = "The next attempt may begin then: the controller lets a failed one rest."


def upgrade() -> None:
    op.execute("ALTER TABLE rollouts ADD COLUMN due_at timestamptz NOT NULL DEFAULT now()")
    op.execute("ALTER TABLE runs DROP COLUMN max_attempts")
    op.execute(f"COMMENT ON COLUMN rollouts.due_at IS '{COMMENT}'")


def downgrade() -> None:
    op.execute("ALTER TABLE rollouts DROP COLUMN due_at")
    op.execute(f"ALTER TABLE runs ADD COLUMN max_attempts {MAX_ATTEMPTS}")
