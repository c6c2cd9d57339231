"""The wait of each request to the model and the fate of its answer, and the controller's word that a failure was none
of the agent's."""

from alembic import op

revision = "20261125_0036"
down_revision = "20261125_0035"
branch_labels = None
depends_on = None

COMMENTS = {
    "TABLE deliveries": "Writer: gateway. The wait of one request to the model and the fate of its answer. The row of a"
    " request that waits is written while it waits; a repeat changes nothing. Pruning deletes a run''s rows.",
    "COLUMN deliveries.run_id": "The run of the rollout.",
    "COLUMN deliveries.request_id": "The id of the request''s first choice.",
    "COLUMN deliveries.rollout_id": "From the path that the agent called.",
    "COLUMN deliveries.attempt": "From the path that the agent called.",
    "COLUMN deliveries.gateway": "The gateway process that has the request.",
    "COLUMN deliveries.sequence": "Arrival in nanoseconds since the epoch, as in model_calls.",
    "COLUMN deliveries.request_sha256": "Digest of the body, as in model_calls.",
    "COLUMN deliveries.waited_seconds": "How long its client waited for the platform, the time of sampling left out;"
    " null while it waits.",
    "COLUMN deliveries.seconds": "Arrival to the last byte, or to the moment at which the client left; null while it"
    " waits.",
    "COLUMN deliveries.delivered": "Whether the last byte of an answer went to a client that was still connected; null"
    " while that is unknown.",
    "TABLE gateways": "Writer: gateway. A gateway process and its last sign of life.",
    "COLUMN gateways.name": "Host, process id and a random word.",
    "COLUMN gateways.seen_at": "By now it had written every request that had waited.",
    "COLUMN rollouts.excused_attempt": "The last attempt that ended by a failure of the platform: the rollout may run"
    " again.",
}
# Pruning a run removes what is told of its requests, too.
DELETE = "DELETE FROM deliveries WHERE run_id = ended;\n    RETURN freed;"
RETURN = "RETURN freed;"


def upgrade() -> None:
    op.execute("""
        CREATE TABLE deliveries (
            run_id text NOT NULL,
            request_id text NOT NULL,
            rollout_id text NOT NULL,
            attempt integer NOT NULL,
            gateway text NOT NULL,
            sequence bigint NOT NULL,
            request_sha256 bytea NOT NULL,
            waited_seconds double precision,
            seconds double precision,
            delivered boolean,
            created_at timestamptz DEFAULT now() NOT NULL,
            CONSTRAINT pk_deliveries PRIMARY KEY (run_id, request_id)
        )
    """)
    op.execute("CREATE INDEX ix_deliveries_rollout_id_attempt ON deliveries (rollout_id, attempt)")
    op.execute("""
        CREATE TABLE gateways (
            name text NOT NULL,
            seen_at timestamptz NOT NULL,
            CONSTRAINT pk_gateways PRIMARY KEY (name)
        )
    """)
    op.execute("ALTER TABLE rollouts ADD COLUMN excused_attempt integer DEFAULT 0 NOT NULL")
    for name, comment in COMMENTS.items():
        op.execute(f"COMMENT ON {name} IS '{comment}'")
    _replace_in_prune_run(RETURN, DELETE)


def downgrade() -> None:
    _replace_in_prune_run(DELETE, RETURN)
    op.execute("ALTER TABLE rollouts DROP COLUMN excused_attempt")
    op.execute("DROP TABLE gateways")
    op.execute("DROP TABLE deliveries")


def _replace_in_prune_run(old: str, new: str) -> None:
    op.execute(
        f"DO $do$ BEGIN EXECUTE replace(pg_get_functiondef('prune_run'::regproc), $${old}$$, $${new}$$); END $do$"
    )
