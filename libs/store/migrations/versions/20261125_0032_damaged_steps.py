"""Steps whose files were found damaged, which are warnings of their run."""

from alembic import op

revision = "20261125_0032"
down_revision = "20261124_0031"
branch_labels = None
depends_on = None

COMMENTS = {
    "TABLE damaged_steps": "Writer: trainer. A step whose files were not those that had been written, each time that a"
    " trainer found it.",
    "COLUMN damaged_steps.run_id": "The trained run.",
    "COLUMN damaged_steps.step": "Number of the step.",
    "COLUMN damaged_steps.cause": "The file, and how it differs.",
    "COLUMN damaged_steps.created_at": "The start of the transaction that wrote the row.",
}


def upgrade() -> None:
    op.execute("""
        CREATE TABLE damaged_steps (
            run_id text NOT NULL,
            step integer NOT NULL,
            cause text NOT NULL,
            created_at timestamptz DEFAULT now() NOT NULL,
            CONSTRAINT pk_damaged_steps PRIMARY KEY (run_id, step, created_at),
            CONSTRAINT fk_damaged_steps_run_id_runs FOREIGN KEY (run_id) REFERENCES runs(id) ON DELETE CASCADE
        )
    """)
    for name, comment in COMMENTS.items():
        op.execute(f"COMMENT ON {name} IS '{comment}'")


def downgrade() -> None:
    op.execute("DROP TABLE damaged_steps")
