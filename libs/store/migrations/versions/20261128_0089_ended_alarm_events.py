"""Comments of the webhook's events: alarms that end are events, too."""

from alembic import op

revision = "20261128_0089"
down_revision = "20261128_0088"
branch_labels = None
depends_on = None

ID = "<run>.completed, <run>.failed or <run>.alarm.<number>"
EVENT = "completed, failed, stalled or alarm."


def upgrade() -> None:
    _comment("<run>.completed, <run>.failed, <run>.alarm.<number>, and with .ended its end.", ID, "id")
    _comment("completed, failed, stalled, alarm or alarm_ended.", EVENT, "event")


def downgrade() -> None:
    _comment(ID, None, "id")
    _comment(EVENT, None, "event")


def _comment(words: str, before: str | None, column: str) -> None:
    op.alter_column("webhook_events", column, comment=words, existing_comment=before)
