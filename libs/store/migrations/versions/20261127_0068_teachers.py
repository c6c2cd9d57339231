"""The version that teaches a run by distillation."""

from alembic import op

revision = "20261127_0068"
down_revision = "20261127_0064c"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "ALTER TABLE runs ADD COLUMN teacher text"
        " GENERATED ALWAYS AS (config #>> '{algorithm,distillation,run}') STORED,"
        " ADD COLUMN teacher_version integer"
        " GENERATED ALWAYS AS ((config #>> '{algorithm,distillation,version}')::integer) STORED"
    )


def downgrade() -> None:
    op.execute("ALTER TABLE runs DROP COLUMN teacher, DROP COLUMN teacher_version")
