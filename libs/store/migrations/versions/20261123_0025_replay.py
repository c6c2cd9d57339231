"""Further uses of groups by later steps."""

from alembic import op

revision = "20261123_0025"
down_revision = "20261123_0024"
branch_labels = None
depends_on = None

COMMENTS = {
    "TABLE step_replays": "Writer: trainer. A further use of a trained group, in the transaction of the step that uses"
    " it: each use is in one step.",
    "COLUMN step_replays.group_id": "A group that an earlier step trained.",
    "COLUMN step_replays.use": "1 for the first use after the group''s own step.",
    "COLUMN step_replays.run_id": "Run of the group.",
    "COLUMN step_replays.step": "The step that used the group again.",
}


def upgrade() -> None:
    op.execute("""
        CREATE TABLE step_replays (
            group_id text NOT NULL,
            use integer NOT NULL,
            run_id text NOT NULL,
            step integer NOT NULL,
            created_at timestamptz DEFAULT now() NOT NULL,
            CONSTRAINT pk_step_replays PRIMARY KEY (group_id, use),
            CONSTRAINT fk_step_replays_group_id_step_groups FOREIGN KEY (group_id) REFERENCES step_groups(group_id),
            CONSTRAINT uq_step_replays_group_id_step UNIQUE (group_id, step),
            CONSTRAINT ck_step_replays_use_positive CHECK (use > 0)
        )
    """)
    op.execute("CREATE INDEX ix_step_replays_run_id_step ON step_replays (run_id, step)")
    op.execute(
        "CREATE TRIGGER step_replays_append_only BEFORE UPDATE OR DELETE ON step_replays"
        " FOR EACH ROW EXECUTE FUNCTION refuse_change()"
    )
    for name, comment in COMMENTS.items():
        op.execute(f"COMMENT ON {name} IS '{comment}'")


def downgrade() -> None:
    op.execute("DROP TABLE step_replays")
