"""A call's row holds what it adds to the call before: a session's rows were quadratic in its turns, and most of what
recording a late turn cost.

Rows that exist are whole, and stay so. What reads calls must know the column before the first gateway writes it.
"""

import sqlalchemy as sa
from alembic import op

revision = "20261121_0010"
down_revision = "20261121_0009"
branch_labels = None
depends_on = None

# column: comment before, comment
COMMENTS = {
    "messages": (
        "{messages, tools} as sent.",
        "{messages, tools} as sent; {messages} alone, those not in the call that it continues.",
    ),
    "prompt_ids": (
        "int32[prompt_tokens]",
        "int32[prompt_tokens], without the tokens of the call that it continues.",
    ),
    "prompt_tokens": ("Length of prompt_ids.", "Tokens of the whole prompt."),
}


def upgrade() -> None:
    op.add_column(
        "model_calls",
        sa.Column(
            "continues",
            sa.Text(),
            nullable=True,
            comment="An earlier call of the attempt: its messages, and its prompt and sampled tokens, come before those of this row. Null where the row has all. The view whole_calls shows calls whole.",
        ),
    )
    for column, (before, comment) in COMMENTS.items():
        op.alter_column("model_calls", column, comment=comment, existing_comment=before)


def downgrade() -> None:
    """Raises: RuntimeError: rows that hold a part would be taken for whole calls"""
    if op.get_bind().scalar(sa.text("SELECT EXISTS (SELECT FROM model_calls WHERE continues IS NOT NULL)")):
        raise RuntimeError("model_calls holds calls that continue others: prune their runs first")
    op.execute("DROP VIEW IF EXISTS whole_calls")
    for column, (before, comment) in COMMENTS.items():
        op.alter_column("model_calls", column, comment=before, existing_comment=comment)
    op.drop_column("model_calls", "continues")
