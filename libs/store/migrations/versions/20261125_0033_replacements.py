"""Groups that sample the task of a lost group again."""

from alembic import op

revision = "20261125_0033"
down_revision = "20261125_0032"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE groups ADD COLUMN replaces text")
    op.execute(
        "COMMENT ON COLUMN groups.replaces IS 'The lost group whose task it samples again; null for a task whose turn it"
        " was.'"
    )
    op.execute("CREATE UNIQUE INDEX ix_groups_replaces ON groups (run_id, replaces) WHERE replaces IS NOT NULL")


def downgrade() -> None:
    op.execute("DROP INDEX ix_groups_replaces")
    op.execute("ALTER TABLE groups DROP COLUMN replaces")
