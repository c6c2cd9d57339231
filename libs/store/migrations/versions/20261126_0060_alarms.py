"""Alarms of runs by one table of rules, and the events of the operator's webhook."""

from alembic import op

revision = "20261126_0060"
down_revision = "20261126_0057b"
branch_labels = None
depends_on = None

COMMENTS = {
    "TABLE alarms": "Writer: controller. Trouble of a run by a rule of the table of alarms. One of a rule and a subject"
    " lasts at a time.",
    "COLUMN alarms.run_id": "The run.",
    "COLUMN alarms.number": "From 1 within the run.",
    "COLUMN alarms.name": "The rule.",
    "COLUMN alarms.subject": "The tool, component or field; empty for the run as a whole.",
    "COLUMN alarms.severity": "warning or critical.",
    "COLUMN alarms.reason": "For people, by the last judgement.",
    "COLUMN alarms.evidence": "The figures of the last judgement, by name.",
    "COLUMN alarms.remedy": "For people.",
    "COLUMN alarms.raised_at": "The first judgement that found it.",
    "COLUMN alarms.seen_at": "The last judgement that found it.",
    "COLUMN alarms.ended_at": "Null while it lasts, and where it lasted until the end of the run.",
    "COLUMN run_status.judged_end": "The finished_at whose alarms and events are written; another one is judged again.",
    "TABLE webhook_events": "Writer: controller. An event of a run for the operator''s webhook, in the transaction that"
    " raises its alarm or judges its end. It is delivered at least once, or given up after many tries.",
    "COLUMN webhook_events.id": "<run>.completed, <run>.failed or <run>.alarm.<number>",
    "COLUMN webhook_events.run_id": "The run.",
    "COLUMN webhook_events.event": "completed, failed, stalled or alarm.",
    "COLUMN webhook_events.body": "The JSON that is sent.",
    "COLUMN webhook_events.tries": "Deliveries that failed.",
    "COLUMN webhook_events.due_at": "The next delivery; null once it is delivered or given up.",
    "COLUMN webhook_events.delivered_at": "The time at which the receiver accepted it.",
    "COLUMN webhook_events.error": "The cause of the last failure.",
    "COLUMN webhook_events.created_at": "The start of the transaction that wrote the row.",
}


def upgrade() -> None:
    op.execute("""
        CREATE TABLE alarms (
            run_id text NOT NULL,
            number integer NOT NULL,
            name text NOT NULL,
            subject text NOT NULL,
            severity text NOT NULL,
            reason text NOT NULL,
            evidence jsonb NOT NULL,
            remedy text NOT NULL,
            raised_at timestamptz DEFAULT now() NOT NULL,
            seen_at timestamptz DEFAULT now() NOT NULL,
            ended_at timestamptz,
            CONSTRAINT pk_alarms PRIMARY KEY (run_id, number),
            CONSTRAINT fk_alarms_run_id_runs FOREIGN KEY (run_id) REFERENCES runs(id) ON DELETE CASCADE
        )
    """)
    op.execute("CREATE UNIQUE INDEX uq_alarms_lasting ON alarms (run_id, name, subject) WHERE ended_at IS NULL")
    op.execute("""
        CREATE TABLE webhook_events (
            id text NOT NULL,
            run_id text NOT NULL,
            event text NOT NULL,
            body jsonb NOT NULL,
            tries integer DEFAULT 0 NOT NULL,
            due_at timestamptz DEFAULT now(),
            delivered_at timestamptz,
            error text,
            created_at timestamptz DEFAULT now() NOT NULL,
            CONSTRAINT pk_webhook_events PRIMARY KEY (id),
            CONSTRAINT fk_webhook_events_run_id_runs FOREIGN KEY (run_id) REFERENCES runs(id) ON DELETE CASCADE
        )
    """)
    op.execute("CREATE INDEX ix_webhook_events_run_id ON webhook_events (run_id)")
    op.execute("CREATE INDEX ix_webhook_events_due ON webhook_events (due_at) WHERE due_at IS NOT NULL")
    op.execute("ALTER TABLE run_status ADD COLUMN judged_end timestamptz")
    # Runs that ended before have no alarms: nobody waits for news of them.
    op.execute("UPDATE run_status SET judged_end = finished_at WHERE finished_at IS NOT NULL")
    for name, comment in COMMENTS.items():
        op.execute(f"COMMENT ON {name} IS '{comment}'")


def downgrade() -> None:
    op.execute("ALTER TABLE run_status DROP COLUMN judged_end")
    op.execute("DROP TABLE webhook_events")
    op.execute("DROP TABLE alarms")
