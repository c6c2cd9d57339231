"""The settings of the device, as a run's first trainer resolved them."""

from alembic import op

revision = "20261126_0057"
down_revision = "20261125_0049"
branch_labels = None
depends_on = None

COMMENTS = {
    "TABLE computations": "Writer: trainer. The settings that a run''s document leaves to the device, as its first trainer"
    " resolved them.",
    "COLUMN computations.run_id": "The trained run.",
    "COLUMN computations.device": "The kind of device that resolved them: cpu, cuda.",
    "COLUMN computations.settings": "{precision, attention, export_dtype, correction}: none is null.",
    "COLUMN computations.latest_device": "The kind on which a trainer was last opened.",
    "COLUMN computations.created_at": "The start of the transaction that wrote the row.",
}


def upgrade() -> None:
    op.execute("""
        CREATE TABLE computations (
            run_id text NOT NULL,
            device text NOT NULL,
            settings jsonb NOT NULL,
            latest_device text NOT NULL,
            created_at timestamptz DEFAULT now() NOT NULL,
            CONSTRAINT pk_computations PRIMARY KEY (run_id),
            CONSTRAINT fk_computations_run_id_runs FOREIGN KEY (run_id) REFERENCES runs(id) ON DELETE CASCADE
        )
    """)
    for name, comment in COMMENTS.items():
        op.execute(f"COMMENT ON {name} IS '{comment}'")


def downgrade() -> None:
    op.execute("DROP TABLE computations")
