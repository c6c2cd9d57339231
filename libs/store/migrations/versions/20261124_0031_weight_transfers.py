"""Policy versions that trainers send to engines over the network."""

from alembic import op

revision = "20261124_0031"
down_revision = "20261124_0030"
branch_labels = None
depends_on = None

COMMENTS = {
    "TABLE weight_transfers": "Writer: controller asks for it; the trainer writes how to join. A policy version on its"
    " way to one engine.",
    "COLUMN weight_transfers.engine_url": "The engine; one version at a time is on its way to it.",
    "COLUMN weight_transfers.run_id": "The run whose trainer sends.",
    "COLUMN weight_transfers.policy_version": "The version to send.",
    "COLUMN weight_transfers.group_name": "The name of the process group, new for each transfer.",
    "COLUMN weight_transfers.world_size": "Processes of the group: the trainer, rank 0, and those of the engine.",
    "COLUMN weight_transfers.sender": "Backend, address and port of the trainer, and the tensors in their order; null"
    " until it is ready to send.",
}


def upgrade() -> None:
    op.execute("""
        CREATE TABLE weight_transfers (
            engine_url text NOT NULL,
            run_id text NOT NULL,
            policy_version integer NOT NULL,
            group_name text NOT NULL,
            world_size integer NOT NULL,
            sender jsonb,
            created_at timestamptz DEFAULT now() NOT NULL,
            CONSTRAINT pk_weight_transfers PRIMARY KEY (engine_url),
            CONSTRAINT fk_weight_transfers_run_id_runs FOREIGN KEY (run_id) REFERENCES runs(id) ON DELETE CASCADE
        )
    """)
    op.execute("CREATE INDEX ix_weight_transfers_run_id ON weight_transfers (run_id)")
    for name, comment in COMMENTS.items():
        op.execute(f"COMMENT ON {name} IS '{comment}'")


def downgrade() -> None:
    op.execute("DROP TABLE weight_transfers")
