"""Ends of trainers, with their reasons and the last lines of their output."""

from alembic import op

revision = "20261125_0038"
down_revision = "20261125_0037"
branch_labels = None
depends_on = None

COMMENTS = {
    "TABLE trainer_ends": "Writer: controller. An end of a run''s trainer, planned ones apart.",
    "COLUMN trainer_ends.run_id": "The run of the trainer.",
    "COLUMN trainer_ends.attempt": "Number of the start that ended, from 1.",
    "COLUMN trainer_ends.state": "ended (by itself), out_of_memory, killed (by a signal, an eviction or a lost node) or"
    " final (another start would end in the same way).",
    "COLUMN trainer_ends.step": "Steps that the run had made by then.",
    "COLUMN trainer_ends.reason": "The cause with its remedy, in words for users.",
    "COLUMN trainer_ends.output": "The last lines of its output.",
    "COLUMN trainer_ends.created_at": "The start of the transaction that wrote the row.",
}


def upgrade() -> None:
    op.execute("""
        CREATE TABLE trainer_ends (
            run_id text NOT NULL,
            attempt integer NOT NULL,
            state text NOT NULL,
            step integer NOT NULL,
            reason text NOT NULL,
            output text NOT NULL,
            created_at timestamptz DEFAULT now() NOT NULL,
            CONSTRAINT pk_trainer_ends PRIMARY KEY (run_id, attempt),
            CONSTRAINT fk_trainer_ends_run_id_runs FOREIGN KEY (run_id) REFERENCES runs(id) ON DELETE CASCADE
        )
    """)
    for name, comment in COMMENTS.items():
        op.execute(f"COMMENT ON {name} IS '{comment}'")


def downgrade() -> None:
    op.execute("DROP TABLE trainer_ends")
