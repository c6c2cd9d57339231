"""The log of changes through the API by token, tokens that expire, and the giver of each external reward."""

from alembic import op

revision = "20261125_0039"
down_revision = "20261125_0038"
branch_labels = None
depends_on = None

COMMENTS = {
    "TABLE audit_entries": "Writer: api. A change that a bearer token asked for, in the transaction that made it.",
    "COLUMN audit_entries.id": "Grows with the order of the changes.",
    "COLUMN audit_entries.token_id": "The token of the request; first-admin for the first administrator.",
    "COLUMN audit_entries.token_name": "Its name then.",
    "COLUMN audit_entries.action": "The operation of the API, such as create_run.",
    "COLUMN audit_entries.subject": "The id or name in the address, or the id of the new thing.",
    "COLUMN audit_entries.detail": "Further facts of the change: keys, names, values.",
    "COLUMN audit_entries.created_at": "The start of the transaction that wrote the row.",
    "COLUMN api_tokens.expires_at": "The API refuses the token from then on; null for a token without an end.",
    "COLUMN external_rewards.token_name": "The name of the sender's token; null in rows of earlier versions.",
}


def upgrade() -> None:
    op.execute(
        "CREATE TABLE audit_entries ("
        " id bigint GENERATED ALWAYS AS IDENTITY, token_id text NOT NULL, token_name text NOT NULL,"
        " action text NOT NULL, subject text, detail jsonb NOT NULL, created_at timestamptz NOT NULL DEFAULT now(),"
        " CONSTRAINT pk_audit_entries PRIMARY KEY (id))"
    )
    op.execute("CREATE INDEX ix_audit_entries_subject ON audit_entries (subject, id)")
    op.execute("CREATE INDEX ix_audit_entries_token_name ON audit_entries (token_name, id)")
    op.execute("ALTER TABLE api_tokens ADD COLUMN expires_at timestamptz")
    op.execute("ALTER TABLE external_rewards ADD COLUMN token_name text")
    for place, words in COMMENTS.items():
        quoted = words.replace("'", "''")
        op.execute(f"COMMENT ON {place} IS '{quoted}'")


def downgrade() -> None:
    op.execute("ALTER TABLE external_rewards DROP COLUMN token_name")
    op.execute("ALTER TABLE api_tokens DROP COLUMN expires_at")
    op.execute("DROP TABLE audit_entries")
