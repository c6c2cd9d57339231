"""Engines belong to a pool. Those of before belong to the pool `default`, whose model the services' settings name."""

from alembic import op

revision = "20261123_0016"
down_revision = "20261122_0015"
branch_labels = None
depends_on = None

COMMENTS = {
    "TABLE pools": "Writer: controller. Engines that serve one model, and the runs that use them.",
    "COLUMN pools.name": "Runs name it.",
    "COLUMN pools.model_path": "Folder of the base model; null: the services'' own setting.",
    "COLUMN pools.context_length": "Tokens of a call; null: as many as the model allows.",
    "COLUMN pools.run_id": "The run that has the engines.",
    "COLUMN pools.waiting": "Ids of the runs that wait for the engines, in order.",
    "COLUMN pools.updated_at": "The last change.",
    "COLUMN engines.pool": "Its pool.",
    "COLUMN engines.state": "serving, updating, draining or unreachable.",
}


def upgrade() -> None:
    op.execute("""
        CREATE TABLE pools (
            name text NOT NULL,
            model_path text,
            context_length integer,
            run_id text,
            waiting text[] NOT NULL DEFAULT '{}',
            updated_at timestamptz NOT NULL DEFAULT now(),
            CONSTRAINT pk_pools PRIMARY KEY (name)
        )""")
    op.execute("INSERT INTO pools (name) VALUES ('default')")
    op.execute("ALTER TABLE engines ADD pool text NOT NULL DEFAULT 'default'")
    _check_states("serving", "updating", "draining", "unreachable")
    for place, comment in COMMENTS.items():
        op.execute(f"COMMENT ON {place} IS '{comment}'")


def downgrade() -> None:
    op.execute("DELETE FROM engines WHERE state = 'draining'")
    _check_states("serving", "updating", "unreachable")
    op.execute("COMMENT ON COLUMN engines.state IS 'serving, updating or unreachable.'")
    op.execute("ALTER TABLE engines DROP pool")
    op.execute("DROP TABLE pools")


def _check_states(*states: str) -> None:
    names = ", ".join(f"'{state}'" for state in states)
    op.execute(f"""
        ALTER TABLE engines DROP CONSTRAINT ck_engines_state_known,
            ADD CONSTRAINT ck_engines_state_known CHECK (state IN ({names}))""")
