"""The experts that an engine chose for the tokens of a call, and the call of a sample, by which a trainer finds them."""

from alembic import op

revision = "20261127_0084"
down_revision = "20261127_0083"
branch_labels = None
depends_on = None

COMMENTS = {
    "model_calls.routed_experts": "The experts that the engine chose for each token from the last shared one on, but not"
    " for the last one sampled: position of the first uint32, n = layers * experts of a token uint32, bytes of a number"
    " uint8, then uint8 or uint16[tokens, n], whose largest number is an expert not named; null: not recorded.",
    "samples.call_id": "The call whose prompt and sampled tokens these are, by which a trainer finds the experts of each"
    " token; null in rows of an earlier version.",
}


def upgrade() -> None:
    op.execute("ALTER TABLE model_calls ADD COLUMN routed_experts bytea")
    # They hardly compress: trying would cost time.
    op.execute("ALTER TABLE model_calls ALTER COLUMN routed_experts SET STORAGE EXTERNAL")
    op.execute("ALTER TABLE samples ADD COLUMN call_id text")
    for column, comment in COMMENTS.items():
        op.execute(f"COMMENT ON COLUMN {column} IS '{comment}'")


def downgrade() -> None:
    op.execute("ALTER TABLE samples DROP COLUMN call_id")
    op.execute("ALTER TABLE model_calls DROP COLUMN routed_experts")
