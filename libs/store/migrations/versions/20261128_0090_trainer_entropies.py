"""Entropies of the trainer's distributions, beside its log-probabilities."""

from alembic import op

revision = "20261128_0090"
down_revision = "20261128_0089"
branch_labels = None
depends_on = None

COMMENT = (
    "float32, one per trained token of the sample: the entropy in nats, at the sampling temperature, of the"
    " distribution that those weights have in its place. NaN and null as above."
)


def upgrade() -> None:
    op.execute("ALTER TABLE step_samples ADD COLUMN trainer_entropies bytea")
    op.execute(f"COMMENT ON COLUMN step_samples.trainer_entropies IS '{COMMENT}'")


def downgrade() -> None:
    op.execute("ALTER TABLE step_samples DROP COLUMN trainer_entropies")
