"""Model calls store a neutral conversation (turns, tools, answer) in place of one wire format's messages.

The upgrade converts every row. Stop the services that read or write model calls while it runs.
"""

import sqlalchemy as sa
from alembic import op

revision = "20261122_0012"
down_revision = "20261122_0011"
branch_labels = None
depends_on = None

RENAMED = {
    "messages": "turns",
    "response": "answer",
    "continues": "parent_call_id",
    "kept_messages": "shared_turns",
    "kept_tokens": "shared_tokens",
}
COMMENTS = {
    "id": "c and 24 hex digits.",
    "choice": "Index among the choices of the request.",
    "sequence": "Arrival in nanoseconds since the epoch: orders the calls of an attempt.",
    "status": "completed, aborted (the client hung up) or failed.",
    "trainable": "True when the loss may see its tokens.",
    "untrainable_reason": "The parameters that a trainer cannot reproduce, or how the call ended.",
    "request_sha256": "Digest of the body; the gateway recognises the retry of an SDK by it.",
    "dialect": "The wire format that the agent spoke.",
    "request": "The parameters of the request: its body without conversation and tools.",
    "parent_call_id": "An earlier call of the same attempt whose beginning this row shares; null where the row is complete.",
    "shared_turns": "The conversation begins with this many turns of the parent: its turns, then its answer.",
    "shared_tokens": "The prompt begins with this many tokens of the parent: its prompt, then its sampled tokens.",
    "turns": "The turns of the conversation after the shared ones: [{role, content, name, tool_calls, tool_call_id}].",
    "tools": "The tools of the request, members in the order sent; null where the row has the tools of its parent.",
    "answer": "The assistant's turn; null where the call failed or was aborted.",
    "prompt_ids": "int32[prompt_tokens - shared_tokens]: the tokens of the prompt after the shared ones.",
    "prompt_tokens": "Length of the complete prompt, shared tokens included.",
    "cached_tokens": "Tokens of the prompt that the engine found in its prefix cache.",
    "temperature": "The effective one.",
    "trace_id": "Hex, from the traceparent header.",
    "parent_span_id": "Hex, from the traceparent header.",
}
TABLE_COMMENT = (
    "Writer: gateway. One choice of one request to the model, as sampled; durable before its last byte leaves."
    " Partitioned by run. A request for n choices writes n rows that share `request_id`. A row that names a parent call"
    " stores only what it adds to it."
)

TURN_OF = """
CREATE OR REPLACE FUNCTION pg_temp.turn_of(message jsonb) RETURNS jsonb LANGUAGE sql IMMUTABLE AS $$
    SELECT jsonb_strip_nulls(jsonb_build_object(
        'role', CASE message ->> 'role' WHEN 'developer' THEN 'system' ELSE message ->> 'role' END,
        'content', CASE jsonb_typeof(message -> 'content')
            WHEN 'array' THEN (
                SELECT coalesce(string_agg(part ->> CASE part ->> 'type' WHEN 'refusal' THEN 'refusal' ELSE 'text' END,
                                           chr(10) ORDER BY place), '')
                FROM jsonb_array_elements(message -> 'content') WITH ORDINALITY AS parts (part, place))
            ELSE coalesce(message ->> 'content', '') END,
        'name', message -> 'name',
        'tool_calls', (
            SELECT jsonb_agg(jsonb_build_object(
                'id', coalesce(call ->> 'id', ''), 'name', call -> 'function' -> 'name',
                'arguments', coalesce(call -> 'function' ->> 'arguments', '')) ORDER BY place)
            FROM jsonb_array_elements(nullif(message -> 'tool_calls', 'null')) WITH ORDINALITY AS calls (call, place)
            WHERE message ->> 'role' = 'assistant'),
        'tool_call_id', message -> 'tool_call_id'))
$$
"""
LINKS = """
CREATE TEMPORARY TABLE links ON COMMIT DROP AS
SELECT run_id, id, continues, kept_messages, kept_tokens, jsonb_array_length(messages -> 'messages') AS own_turns,
       prompt_tokens + completion_tokens AS tokens
FROM model_calls
"""
# A row without kept numbers kept every message and token of the call before it, but not that call's answer as a turn.
SHARED = """
CREATE TEMPORARY TABLE shared ON COMMIT DROP AS
WITH RECURSIVE counted AS (
    SELECT run_id, id, 0 AS turns_of_parent, 0 AS tokens_of_parent, own_turns AS turns, tokens
    FROM links WHERE continues IS NULL
    UNION ALL
    SELECT l.run_id, l.id, coalesce(l.kept_messages, p.turns), coalesce(l.kept_tokens, p.tokens),
           coalesce(l.kept_messages, p.turns) + l.own_turns, l.tokens
    FROM counted p JOIN links l ON l.run_id = p.run_id AND l.continues = p.id)
SELECT run_id, id, turns_of_parent, tokens_of_parent FROM counted
"""
CONVERT = """
UPDATE model_calls c SET
    turns = (SELECT coalesce(jsonb_agg(pg_temp.turn_of(message) ORDER BY place), '[]')
             FROM jsonb_array_elements(c.turns -> 'messages') WITH ORDINALITY AS messages (message, place)),
    tools = CASE WHEN c.parent_call_id IS NULL THEN coalesce(nullif(c.turns -> 'tools', 'null'), '[]')::json END,
    answer = CASE WHEN jsonb_typeof(c.answer) = 'object' THEN pg_temp.turn_of(c.answer) END,
    shared_turns = coalesce(s.turns_of_parent, c.shared_turns, 0),
    shared_tokens = coalesce(s.tokens_of_parent, c.shared_tokens, 0)
FROM links l LEFT JOIN shared s ON s.run_id = l.run_id AND s.id = l.id
WHERE c.run_id = l.run_id AND c.id = l.id
"""
COMPRESS = """
DO $$
DECLARE part regclass;
BEGIN
    FOR part IN SELECT 'model_calls'::regclass UNION ALL SELECT inhrelid FROM pg_inherits
        WHERE inhparent = 'model_calls'::regclass
    LOOP
        EXECUTE format('ALTER TABLE %s ALTER tools SET COMPRESSION lz4', part);
    END LOOP;
EXCEPTION WHEN feature_not_supported THEN
    ALTER TABLE model_calls ALTER tools SET STORAGE EXTERNAL;
END $$
"""


def upgrade() -> None:
    op.execute("DROP VIEW IF EXISTS whole_calls")
    for statement in (TURN_OF, LINKS, "CREATE INDEX ON links (run_id, continues)", "ANALYZE links", SHARED):
        op.execute(statement)
    op.execute("CREATE INDEX ON shared (run_id, id)")
    op.execute("ANALYZE shared")
    for old, new in RENAMED.items():
        op.alter_column("model_calls", old, new_column_name=new)
    op.add_column("model_calls", sa.Column("tools", sa.JSON(), nullable=True))
    op.add_column("model_calls", sa.Column("dialect", sa.Text(), nullable=False, server_default="chat_completions"))
    op.alter_column("model_calls", "dialect", server_default=None)
    op.execute(COMPRESS)
    op.execute("ALTER TABLE model_calls DISABLE TRIGGER model_calls_append_only")
    op.execute(CONVERT)
    op.execute("ALTER TABLE model_calls ENABLE TRIGGER model_calls_append_only")
    for column in ("shared_turns", "shared_tokens"):
        op.alter_column("model_calls", column, nullable=False, server_default="0")
    # Postgres 18 names the constraint after the column: drop the one that has the old name.
    op.alter_column("model_calls", "turns", nullable=True)
    op.alter_column("model_calls", "turns", nullable=False)
    for column, comment in COMMENTS.items():
        op.alter_column("model_calls", column, comment=comment)
    op.create_table_comment("model_calls", TABLE_COMMENT)
    op.alter_column("runs", "config", comment="The run's document (RunConfig).")
    op.alter_column(
        "group_credits", "reward_std", comment="Over counted siblings: the standard deviation of the population."
    )
    op.create_table_comment(
        "state_transitions",
        "Writer: migrations. The transitions of states that the triggers allow; they refuse every other change.",
    )


def downgrade() -> None:
    """Raises: RuntimeError: the earlier form cannot hold calls of other dialects or with shared answers"""
    if op.get_bind().scalar(sa.text("SELECT EXISTS (SELECT FROM model_calls)")):
        raise RuntimeError("model_calls holds calls in the neutral form: prune their runs first")
    for column in ("shared_turns", "shared_tokens"):
        op.alter_column("model_calls", column, nullable=True, server_default=None)
    for column in ("dialect", "tools"):
        op.drop_column("model_calls", column)
    for old, new in RENAMED.items():
        op.alter_column("model_calls", new, new_column_name=old)
    op.alter_column("model_calls", "messages", nullable=True)
    op.alter_column("model_calls", "messages", nullable=False)
