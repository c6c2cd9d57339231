"""A row may keep only the beginning of the call that it continues: of an agent whose last message is in no later
request, each row was whole.

Rows that exist keep all, as before. What reads calls must know the columns before the first gateway writes them.
"""

import sqlalchemy as sa
from alembic import op

revision = "20261122_0011"
down_revision = "20261121_0010"
branch_labels = None
depends_on = None

# column: comment before, comment
COMMENTS = {
    "continues": (
        "An earlier call of the attempt: its messages, and its prompt and sampled tokens, come before those of this row. Null where the row has all. The view whole_calls shows calls whole.",
        "An earlier call of the attempt: its messages, and its prompt and sampled tokens, come before those of this row, all or as many as are kept. Null where the row has all. The view whole_calls shows calls whole.",
    ),
    "messages": (
        "{messages, tools} as sent; {messages} alone, those not in the call that it continues.",
        "{messages, tools} as sent; {messages} alone, those after what it keeps of the call that it continues.",
    ),
    "prompt_ids": (
        "int32[prompt_tokens], without the tokens of the call that it continues.",
        "int32[prompt_tokens], without the tokens that it keeps of the call that it continues.",
    ),
}


def upgrade() -> None:
    of_messages = "How many messages of the call that it continues come before those of this row; null: all."
    of_ids = "How many tokens of the call that it continues, of its prompt and then of those sampled, come before those of this row; null: all."
    op.add_column("model_calls", sa.Column("kept_messages", sa.Integer(), nullable=True, comment=of_messages))
    op.add_column("model_calls", sa.Column("kept_tokens", sa.Integer(), nullable=True, comment=of_ids))
    for column, (before, comment) in COMMENTS.items():
        op.alter_column("model_calls", column, comment=comment, existing_comment=before)


def downgrade() -> None:
    """Raises: RuntimeError: rows that keep a part would be taken for such as keep all"""
    if op.get_bind().scalar(sa.text("SELECT EXISTS (SELECT FROM model_calls WHERE kept_tokens IS NOT NULL)")):
        raise RuntimeError("model_calls holds calls that keep a part of others: prune their runs first")
    op.execute("DROP VIEW IF EXISTS whole_calls")
    for column, (before, comment) in COMMENTS.items():
        op.alter_column("model_calls", column, comment=before, existing_comment=comment)
    for column in ("kept_tokens", "kept_messages"):
        op.drop_column("model_calls", column)
