"""The names of agents by fingerprint: a name once seen belongs to all calls of the agent in the run."""

from alembic import op

revision = "20261125_0045"
down_revision = "20261125_0044"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "CREATE TABLE agent_names (run_id text NOT NULL, agent text NOT NULL, name text NOT NULL,"
        " CONSTRAINT pk_agent_names PRIMARY KEY (run_id, agent),"
        " CONSTRAINT fk_agent_names_run_id_runs FOREIGN KEY (run_id) REFERENCES runs (id))"
    )


def downgrade() -> None:
    op.execute("DROP TABLE agent_names")
