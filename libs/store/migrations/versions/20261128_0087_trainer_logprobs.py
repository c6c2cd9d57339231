"""Log-probabilities of the trainer, beside the step that trained a sample."""

from alembic import op

revision = "20261128_0087"
down_revision = "20261127_0086"
branch_labels = None
depends_on = None

COMMENT = (
    "float32, one per trained token of the sample: its log-probability by the weights at the step''s start. NaN where the"
    " step did not compute it; null in steps of older versions."
)


def upgrade() -> None:
    op.execute("ALTER TABLE step_samples ADD COLUMN trainer_logprobs bytea")
    op.execute(f"COMMENT ON COLUMN step_samples.trainer_logprobs IS '{COMMENT}'")


def downgrade() -> None:
    op.execute("ALTER TABLE step_samples DROP COLUMN trainer_logprobs")
