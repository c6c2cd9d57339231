"""The gateway writes the spans of embeddings, beside the collector."""

from alembic import op

revision = "20261127_0082c"
down_revision = "20261127_0082b"
branch_labels = None
depends_on = None

COMMENTS = {
    "TABLE spans": (
        "Writer: collector and gateway. One OpenTelemetry span; a re-sent one changes nothing. The gateway writes those"
        " of embeddings. Partitioned by run.",
        "Writer: collector. One OpenTelemetry span; a re-sent one changes nothing. Partitioned by run.",
    ),
    **dict.fromkeys(
        ("COLUMN spans.start_ns", "COLUMN spans.end_ns"),
        (
            "Nanoseconds since the epoch, by the clock of the agent or the gateway.",
            "Nanoseconds since the epoch, by the agent''s clock.",
        ),
    ),
}


def upgrade() -> None:
    for subject, (comment, _) in COMMENTS.items():
        op.execute(f"COMMENT ON {subject} IS '{comment}'")


def downgrade() -> None:
    for subject, (_, comment) in COMMENTS.items():
        op.execute(f"COMMENT ON {subject} IS '{comment}'")
