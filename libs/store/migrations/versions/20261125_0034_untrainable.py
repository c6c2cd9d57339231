"""Groups without a trainable token have a verdict of their own, and credit counts the calls of each group."""

from alembic import op

revision = "20261125_0034"
down_revision = "20261125_0033"
branch_labels = None
depends_on = None

VERDICTS = "'trained', 'no_variance', 'untrainable', 'stale'"
VERDICTS_BEFORE = "'trained', 'no_variance', 'stale'"
COMMENTS = {
    "group_credits.calls": "Counts of its calls for this run: {calls, untrainable by reason, malformed, empty, cut,"
    " tools by tool and status}; null for an excluded group.",
    "step_groups.verdict": "trained, no_variance (its rewards teach nothing), untrainable (no token can train) or stale"
    " (refused).",
}
COMMENT_BEFORE = "trained, no_variance (counted without training) or stale (refused)."


def upgrade() -> None:
    op.execute("ALTER TABLE group_credits ADD COLUMN calls jsonb")
    _allow(VERDICTS)
    for column, comment in COMMENTS.items():
        op.execute(f"COMMENT ON COLUMN {column} IS '{comment}'")


def downgrade() -> None:
    op.execute("ALTER TABLE step_groups DISABLE TRIGGER USER")
    op.execute("UPDATE step_groups SET verdict = 'no_variance' WHERE verdict = 'untrainable'")
    op.execute("ALTER TABLE step_groups ENABLE TRIGGER USER")
    _allow(VERDICTS_BEFORE)
    op.execute(f"COMMENT ON COLUMN step_groups.verdict IS '{COMMENT_BEFORE}'")
    op.execute("ALTER TABLE group_credits DROP COLUMN calls")


def _allow(verdicts: str) -> None:
    op.execute("ALTER TABLE step_groups DROP CONSTRAINT ck_step_groups_verdict_known")
    op.execute(f"ALTER TABLE step_groups ADD CONSTRAINT ck_step_groups_verdict_known CHECK (verdict IN ({verdicts}))")
