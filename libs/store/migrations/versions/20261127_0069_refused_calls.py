"""Calls that were refused have rows."""

from alembic import op

revision = "20261127_0069"
down_revision = "20261127_0068"
branch_labels = None
depends_on = None

STATUSES = "'completed', 'aborted', 'failed', 'refused'"
STATUSES_BEFORE = "'completed', 'aborted', 'failed'"
COMMENTS = {
    "status": "completed, aborted (the client hung up), failed, or refused (the request is at fault).",
    "finish_reason": "stop, length or tool_calls; of a refused call the code of its error, as context_length_exceeded.",
}
COMMENTS_BEFORE = {
    "status": "completed, aborted (the client hung up) or failed.",
    "finish_reason": "stop, length, tool_calls or abort; null when it failed.",
}


def upgrade() -> None:
    _allow(STATUSES)
    _comment(COMMENTS)


def downgrade() -> None:
    op.execute("ALTER TABLE model_calls DISABLE TRIGGER USER")
    op.execute("UPDATE model_calls SET status = 'aborted', finish_reason = NULL WHERE status = 'refused'")
    op.execute("ALTER TABLE model_calls ENABLE TRIGGER USER")
    _allow(STATUSES_BEFORE)
    _comment(COMMENTS_BEFORE)


def _allow(statuses: str) -> None:
    op.execute("ALTER TABLE model_calls DROP CONSTRAINT ck_model_calls_status_known")
    op.execute(f"ALTER TABLE model_calls ADD CONSTRAINT ck_model_calls_status_known CHECK (status IN ({statuses}))")


def _comment(comments: dict[str, str]) -> None:
    for column, comment in comments.items():
        op.execute(f"COMMENT ON COLUMN model_calls.{column} IS '{comment}'")
