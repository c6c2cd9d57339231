"""Runs that carry a further policy of another run: each judges and trains that run's groups for itself."""

from alembic import op
from sqlalchemy import text

revision = "20261123_0027"
down_revision = "20261123_0026"
branch_labels = None
depends_on = None

COMMENTS = {
    "COLUMN runs.lead_run_id": "The run from whose rollouts this one learns, as one of its policies; null for others.",
    "COLUMN runs.policy": "The name of the policy in the document of that run.",
    "TABLE group_credits": "Writer: credit. The verdict on a complete training group for a run that trains on it, in"
    " one transaction with the samples.",
    "COLUMN group_credits.run_id": "Run of the group, or a run that carries another policy of it.",
    "COLUMN group_credits.min_policy_version": "Over the trained tokens of its samples for this run; null without any.",
    "TABLE step_groups": "Writer: trainer. The verdict of a run''s trainer on a credited group, at most one, in the"
    " step''s transaction.",
    "COLUMN step_groups.run_id": "Run of the trainer.",
    "COLUMN step_replays.run_id": "Run of the trainer.",
    "COLUMN samples.run_id": "Partition key: the run that trains it.",
}
JUDGED = "step_groups.group_id = rollouts.group_id", "step_groups.run_id = rollouts.run_id"
CREDITED = "group_credits.group_id = step_groups.group_id", "group_credits.run_id = step_groups.run_id"
VIEWS = {
    "reports.rollouts": JUDGED,
    "reports.rewards": JUDGED,
    "reports.credits": JUDGED,
    "reports.steps": CREDITED,
}


def upgrade() -> None:
    op.execute("""
        ALTER TABLE runs ADD COLUMN lead_run_id text, ADD COLUMN policy text,
            ADD CONSTRAINT fk_runs_lead_run_id_runs FOREIGN KEY (lead_run_id) REFERENCES runs(id),
            ADD CONSTRAINT uq_runs_lead_run_id_policy UNIQUE (lead_run_id, policy)
    """)
    op.execute("""
        ALTER TABLE step_replays DROP CONSTRAINT fk_step_replays_group_id_step_groups,
            DROP CONSTRAINT pk_step_replays, DROP CONSTRAINT uq_step_replays_group_id_step
    """)
    for table in ("group_credits", "step_groups"):
        op.execute(
            f"ALTER TABLE {table} DROP CONSTRAINT pk_{table}, ADD CONSTRAINT pk_{table} PRIMARY KEY (group_id, run_id)"
        )
    op.execute("""
        ALTER TABLE step_replays ADD CONSTRAINT pk_step_replays PRIMARY KEY (group_id, run_id, use),
            ADD CONSTRAINT uq_step_replays_group_id_run_id_step UNIQUE (group_id, run_id, step),
            ADD CONSTRAINT fk_step_replays_group_id_step_groups
                FOREIGN KEY (group_id, run_id) REFERENCES step_groups(group_id, run_id)
    """)
    for view, (one, other) in VIEWS.items():
        _replace(view, one, f"{one} AND {other}")
    for name, comment in COMMENTS.items():
        op.execute(f"COMMENT ON {name} IS '{comment}'")


def downgrade() -> None:
    for view, (one, other) in VIEWS.items():
        _replace(view, f"{one} AND {other}", one)
    op.execute("""
        ALTER TABLE step_replays DROP CONSTRAINT fk_step_replays_group_id_step_groups,
            DROP CONSTRAINT pk_step_replays, DROP CONSTRAINT uq_step_replays_group_id_run_id_step
    """)
    for table in ("group_credits", "step_groups"):
        op.execute(f"ALTER TABLE {table} DROP CONSTRAINT pk_{table}, ADD CONSTRAINT pk_{table} PRIMARY KEY (group_id)")
    op.execute("""
        ALTER TABLE step_replays ADD CONSTRAINT pk_step_replays PRIMARY KEY (group_id, use),
            ADD CONSTRAINT uq_step_replays_group_id_step UNIQUE (group_id, step),
            ADD CONSTRAINT fk_step_replays_group_id_step_groups FOREIGN KEY (group_id) REFERENCES step_groups(group_id)
    """)
    op.execute("ALTER TABLE runs DROP COLUMN lead_run_id, DROP COLUMN policy")


def _replace(view: str, old: str, new: str) -> None:
    """Changes a join of a view, whose text Postgres has."""
    connection = op.get_bind()
    query = text("SELECT pg_get_viewdef(CAST(:view AS regclass), true)")
    definition = connection.scalar(query, {"view": view})
    if old not in definition:
        raise RuntimeError(f"{view} has no join ON {old}")
    connection.exec_driver_sql(f"CREATE OR REPLACE VIEW {view} AS {definition.replace(old, new)}")
