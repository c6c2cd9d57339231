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

# For people: services make calls whole by libs.store.chains, which reads a page of them in two statements. A chain is
# walked once, from the call (place 0) to its first. What a row adds begins after what it keeps, and lasts up to the
# least that any later row keeps.
VIEW = """
    CREATE OR REPLACE VIEW whole_calls AS
    SELECT c.run_id, c.rollout_id, c.attempt, c.sequence, c.choice, c.id, c.status, c.prompt_tokens, c.completion_tokens,
        (WITH RECURSIVE chain (place, continues, kept, before, ids, sampled) AS (
            SELECT 0, c.continues, c.kept_tokens, c.prompt_tokens - length(c.prompt_ids) / 4, c.prompt_ids, ''::bytea
            UNION ALL
            SELECT place + 1, m.continues, m.kept_tokens, m.prompt_tokens - length(m.prompt_ids) / 4, m.prompt_ids,
                m.sampled_ids
            FROM chain JOIN model_calls m ON m.run_id = c.run_id AND m.id = chain.continues),
        cut AS (SELECT *, min(kept) OVER (ORDER BY place ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS upto FROM chain)
        SELECT string_agg(
            CASE WHEN upto IS NULL THEN ids || sampled
                WHEN upto > before THEN substr(ids || sampled, 1, 4 * (upto - before)) END, ''::bytea ORDER BY place DESC)
        FROM cut HAVING bool_or(continues IS NULL)) AS prompt_ids,
        c.sampled_ids,
        (WITH RECURSIVE chain (place, continues, kept, added, count) AS (
            SELECT 0, c.continues, c.kept_messages, c.messages, jsonb_array_length(c.messages -> 'messages')
            UNION ALL
            SELECT place + 1, m.continues, m.kept_messages, m.messages, jsonb_array_length(m.messages -> 'messages')
            FROM chain JOIN model_calls m ON m.run_id = c.run_id AND m.id = chain.continues),
        cut AS (
            SELECT *, min(kept) OVER (ORDER BY place ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS upto,
                count(kept) OVER (ORDER BY place DESC) AS stretch
            FROM chain),
        -- Only the first row of a stretch keeps a part.
        placed AS (
            SELECT *, sum(coalesce(kept, 0) + count) OVER (PARTITION BY stretch ORDER BY place DESC) - count AS before
            FROM cut)
        SELECT jsonb_build_object(
            'messages', (SELECT coalesce(jsonb_agg(one.message ORDER BY place DESC, one.number), '[]') FROM placed
                CROSS JOIN LATERAL jsonb_array_elements(added -> 'messages') WITH ORDINALITY AS one (message, number)
                WHERE upto IS NULL OR before + one.number <= upto),
            'tools', added -> 'tools') FROM chain WHERE continues IS NULL) AS messages,
        c.response, c.created_at
    FROM model_calls c
"""
VIEW_BEFORE = """
    CREATE OR REPLACE VIEW whole_calls AS
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


def upgrade() -> None:
    of_messages = "How many messages of the call that it continues come before those of this row; null: all."
    of_ids = "How many tokens of the call that it continues, of its prompt and then of those sampled, come before those of this row; null: all."
    op.add_column("model_calls", sa.Column("kept_messages", sa.Integer(), nullable=True, comment=of_messages))
    op.add_column("model_calls", sa.Column("kept_tokens", sa.Integer(), nullable=True, comment=of_ids))
    for column, (before, comment) in COMMENTS.items():
        op.alter_column("model_calls", column, comment=comment, existing_comment=before)
    op.execute(VIEW)


def downgrade() -> None:
    """Raises: RuntimeError: rows that keep a part would be taken for such as keep all"""
    if op.get_bind().scalar(sa.text("SELECT EXISTS (SELECT FROM model_calls WHERE kept_tokens IS NOT NULL)")):
        raise RuntimeError("model_calls holds calls that keep a part of others: prune their runs first")
    op.execute(VIEW_BEFORE)
    for column, (before, comment) in COMMENTS.items():
        op.alter_column("model_calls", column, comment=before, existing_comment=comment)
    for column in ("kept_tokens", "kept_messages"):
        op.drop_column("model_calls", column)
