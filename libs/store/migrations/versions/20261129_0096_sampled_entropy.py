"""Reports show the entropy of a step that computed no token, as the API: tokens without variance count."""

import re

from alembic import op
from sqlalchemy import text

revision = "20261129_0096"
down_revision = "20261129_0095"
branch_labels = None
depends_on = None

COMPUTED = "COALESCE((steps.metrics ->> 'computed_tokens'::text)::double precision, 1::double precision) <> 0::double precision"
ENTROPY = "(steps.metrics ->> 'entropy'::text)::double precision"
# Trainers up to 0.2.0 wrote 0 where they had computed nothing.
MEASURED = f"{COMPUTED} OR ({ENTROPY}) <> 0::double precision"


def upgrade() -> None:
    _replace(f"WHEN {COMPUTED} THEN {ENTROPY}", f"WHEN {MEASURED} THEN {ENTROPY}")


def downgrade() -> None:
    _replace(f"WHEN {MEASURED} THEN {ENTROPY}", f"WHEN {COMPUTED} THEN {ENTROPY}")


def _replace(old: str, new: str) -> None:
    connection = op.get_bind()
    definition = connection.scalar(text("SELECT pg_get_viewdef('reports.steps'::regclass, true)"))
    pattern = r"\s+".join(map(re.escape, old.split()))
    changed, count = re.subn(pattern, lambda _: new, definition)
    if not count:
        raise RuntimeError(f"the view reports.steps does not contain {old}: {definition}")
    # The driver's own call: SQLAlchemy would take the colons of the view for parameters.
    connection.exec_driver_sql(
        f"CREATE OR REPLACE VIEW reports.steps AS {changed}", execution_options={"no_parameters": True}
    )
