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

# For people: services make calls whole by libs.store.chains, which reads a page of them in two statements.
VIEW = """
    CREATE VIEW whole_calls AS
    SELECT c.run_id, c.rollout_id, c.attempt, c.sequence, c.choice, c.id, c.status, c.prompt_tokens, c.completion_tokens,
        (WITH RECURSIVE chain (place, continues, ids) AS (
            SELECT 0, c.continues, c.prompt_ids
            UNION ALL
            SELECT place + 1, m.continues, m.prompt_ids || m.sampled_ids
            FROM chain JOIN model_calls m ON m.run_id = c.run_id AND m.id = chain.continues)
        SELECT string_agg(ids, ''::bytea ORDER BY place DESC) FROM chain) AS prompt_ids,
        c.sampled_ids,
        (WITH RECURSIVE chain (place, continues, asked) AS (
            SELECT 0, c.continues, c.messages
            UNION ALL
            SELECT place + 1, m.continues, m.messages
            FROM chain JOIN model_calls m ON m.run_id = c.run_id AND m.id = chain.continues)
        SELECT jsonb_build_object(
            'messages', (SELECT jsonb_agg(one.message ORDER BY place DESC, one.number) FROM chain
                CROSS JOIN LATERAL jsonb_array_elements(asked -> 'messages') WITH ORDINALITY AS one (message, number)),
            'tools', (SELECT asked -> 'tools' FROM chain WHERE continues IS NULL))) AS messages,
        c.response, c.created_at
    FROM model_calls c
"""
VIEW_COMMENT = (
    "Model calls as they were asked: all messages and prompt tokens, where model_calls holds what a call adds."
)


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
    op.execute(VIEW)
    op.execute(f"COMMENT ON VIEW whole_calls IS '{VIEW_COMMENT}'")


def downgrade() -> None:
    """Raises: RuntimeError: rows that hold a part would be taken for whole calls"""
    if op.get_bind().scalar(sa.text("SELECT EXISTS (SELECT FROM model_calls WHERE continues IS NOT NULL)")):
        raise RuntimeError("model_calls holds calls that continue others: prune their runs first")
    op.execute("DROP VIEW whole_calls")
    for column, (before, comment) in COMMENTS.items():
        op.alter_column("model_calls", column, comment=before, existing_comment=comment)
    op.drop_column("model_calls", "continues")
