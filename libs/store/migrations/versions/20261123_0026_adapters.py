"""Pools whose engines serve LoRA adapters of several runs."""

from alembic import op

revision = "20261123_0026"
down_revision = "20261123_0025"
branch_labels = None
depends_on = None

COMMENTS = {
    "COLUMN pools.adapters": "Runs that share the engines, each with a LoRA adapter; null: one run has them.",
    "COLUMN pools.max_adapter_rank": "The largest LoRA rank that the engines take; null: any.",
    "COLUMN pools.run_id": "The first of run_ids, for services of the version before; null without one.",
    "COLUMN pools.run_ids": "The runs that have the engines.",
    "TABLE engine_adapters": "Writer: controller. The policy version of a run that an engine serves beside others.",
    "COLUMN engine_adapters.url": "The engine.",
    "COLUMN engine_adapters.run_id": "A run that shares it.",
    "COLUMN engine_adapters.policy_version": "The version that new calls of the run get.",
    "COLUMN engine_adapters.adapter": "The name of the adapter on the engine; null: the base model is the version.",
}


def upgrade() -> None:
    op.execute("""
        ALTER TABLE pools
            ADD COLUMN adapters integer,
            ADD COLUMN max_adapter_rank integer,
            ADD COLUMN run_ids text[] DEFAULT '{}' NOT NULL
    """)
    op.execute("UPDATE pools SET run_ids = ARRAY[run_id] WHERE run_id IS NOT NULL")
    op.execute("""
        CREATE TABLE engine_adapters (
            url text NOT NULL,
            run_id text NOT NULL,
            policy_version integer NOT NULL,
            adapter text,
            CONSTRAINT pk_engine_adapters PRIMARY KEY (url, run_id),
            CONSTRAINT fk_engine_adapters_url_engines FOREIGN KEY (url) REFERENCES engines(url) ON DELETE CASCADE
        )
    """)
    for name, comment in COMMENTS.items():
        op.execute(f"COMMENT ON {name} IS '{comment}'")


def downgrade() -> None:
    op.execute("DROP TABLE engine_adapters")
    op.execute("COMMENT ON COLUMN pools.run_id IS 'The run that has the engines.'")
    op.execute("ALTER TABLE pools DROP COLUMN run_ids, DROP COLUMN adapters, DROP COLUMN max_adapter_rank")
