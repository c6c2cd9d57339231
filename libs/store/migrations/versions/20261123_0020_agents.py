"""Calls name their agent, and how their prompt continues earlier calls. Calls of before name none."""

from alembic import op

revision = "20261123_0020"
down_revision = "20261123_0019"
branch_labels = None
depends_on = None

COMMENTS = {
    "agent": "16 hex digits: fingerprint of the system prompt, the names of the tools and the header x-agent-name.",
    "agent_name": "From the header x-agent-name, or from the assistant''s last answer that was sent back; else null.",
    "continuation": "extend (its prompt begins with the tokens of an earlier call), fork (it holds an answer whose tokens"
    " it could not reuse, or that was rewritten) or fresh.",
}


def upgrade() -> None:
    # A gateway of before writes no value during a rolling update.
    op.execute("ALTER TABLE model_calls " + ", ".join(f"ADD {name} text" for name in COMMENTS))
    for name, comment in COMMENTS.items():
        op.execute(f"COMMENT ON COLUMN model_calls.{name} IS '{comment}'")


def downgrade() -> None:
    op.execute("ALTER TABLE model_calls " + ", ".join(f"DROP {name}" for name in COMMENTS))
