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
