"""Pauses of engines for new weights, and duels of evaluations."""

from alembic import op

revision = "20261127_0086"
down_revision = "20261127_0085"
branch_labels = None
depends_on = None

COMMENTS = {
    "TABLE weight_swaps": "Writer: controller. A delivery of a policy version to an engine that was paused for it.",
    "COLUMN weight_swaps.number": "Grows with the order of deliveries.",
    "COLUMN weight_swaps.run_id": "The run of the version.",
    "COLUMN weight_swaps.policy_version": "The version that was delivered.",
    "COLUMN weight_swaps.url": "The engine.",
    "COLUMN weight_swaps.seconds": "From pause to continue.",
    "COLUMN weight_swaps.created_at": "The start of the transaction that wrote the row.",
    "TABLE duels": "Writer: api. Two evaluations of one dataset whose answers judges compared pair by pair.",
    "COLUMN duels.number": "Grows with the order of duels.",
    "COLUMN duels.run_id": "The evaluation''s run.",
    "COLUMN duels.evaluation_id": "The evaluation whose win rate it is.",
    "COLUMN duels.against_id": "The other evaluation, whose run may be deleted.",
    "COLUMN duels.reward": "The section reward with the judges.",
    "COLUMN duels.pairs": "{rollout, against, task, values by component: 1 won, 0 lost, null not compared}.",
    "COLUMN duels.given_by": "The name of the token that asked for it.",
    "COLUMN duels.created_at": "The start of the transaction that wrote the row.",
}


def upgrade() -> None:
    op.execute(
        "CREATE TABLE weight_swaps (number bigint GENERATED ALWAYS AS IDENTITY, run_id text NOT NULL,"
        " policy_version integer NOT NULL, url text NOT NULL, seconds double precision NOT NULL,"
        " created_at timestamptz NOT NULL DEFAULT now(), CONSTRAINT pk_weight_swaps PRIMARY KEY (number),"
        " CONSTRAINT fk_weight_swaps_run_id_runs FOREIGN KEY (run_id) REFERENCES runs (id) ON DELETE CASCADE)"
    )
    op.execute("CREATE INDEX ix_weight_swaps_run_id_policy_version ON weight_swaps (run_id, policy_version)")
    op.execute(
        "CREATE TABLE duels (number bigint GENERATED ALWAYS AS IDENTITY, run_id text NOT NULL,"
        " evaluation_id text NOT NULL, against_id text NOT NULL, reward jsonb NOT NULL, pairs jsonb NOT NULL,"
        " given_by text NOT NULL, created_at timestamptz NOT NULL DEFAULT now(),"
        " CONSTRAINT pk_duels PRIMARY KEY (number),"
        " CONSTRAINT fk_duels_run_id_runs FOREIGN KEY (run_id) REFERENCES runs (id) ON DELETE CASCADE)"
    )
    op.execute("CREATE INDEX ix_duels_run_id_number ON duels (run_id, number)")
    for table in ("weight_swaps", "duels"):
        op.execute(
            f"CREATE TRIGGER {table}_append_only BEFORE UPDATE ON {table} FOR EACH ROW EXECUTE FUNCTION refuse_change()"
        )
    for name, comment in COMMENTS.items():
        op.execute(f"COMMENT ON {name} IS '{comment}'")


def downgrade() -> None:
    op.execute("DROP TABLE duels")
    op.execute("DROP TABLE weight_swaps")
