"""Reports show no reward that is still to come, and no mean over re-rolls, as the API."""

import re

from alembic import op
from sqlalchemy import text

revision = "20261128_0088"
down_revision = "20261128_0087"
branch_labels = None
depends_on = None

REWARD = "rollouts.reward"
KNOWN = f"""CASE WHEN runs.awaits_rewards AND rollouts.state = 'finished'
    AND EXISTS (SELECT FROM outcomes o WHERE o.rollout_id = rollouts.id AND o.attempt = rollouts.attempt
                AND o.kind = 'succeeded' AND o.reward IS NULL)
    AND NOT EXISTS (SELECT FROM rewards w WHERE w.rollout_id = rollouts.id AND w.attempt = rollouts.attempt)
    AND NOT EXISTS (SELECT FROM external_rewards x
                    WHERE x.rollout_id = rollouts.id AND coalesce(x.attempt, rollouts.attempt) = rollouts.attempt)
    THEN NULL ELSE {REWARD} END"""  # noqa: S608  # constants alone
PRINTED = re.compile(rf"CASE\s+WHEN runs\.awaits_rewards.*?ELSE {re.escape(REWARD)}\s+END", re.DOTALL)
SAMPLED = "NOT siblings.greedy"
SIBLINGS = f"{SAMPLED} AND siblings.rerolls_of IS NULL"


def upgrade() -> None:
    _replace("rollouts", re.compile(re.escape(REWARD)), KNOWN)
    _replace("steps", re.compile(re.escape(SAMPLED)), SIBLINGS)


def downgrade() -> None:
    _replace("steps", re.compile(re.escape(SIBLINGS)), SAMPLED)
    _replace("rollouts", PRINTED, REWARD)


def _replace(view: str, old: re.Pattern[str], new: str) -> None:
    connection = op.get_bind()
    definition = connection.scalar(text(f"SELECT pg_get_viewdef('reports.{view}'::regclass, true)"))
    changed, count = old.subn(lambda _: new, definition)
    if not count:
        raise RuntimeError(f"the view reports.{view} does not contain {old.pattern}")
    # The driver's own call: SQLAlchemy would take the colons of the view for parameters.
    connection.exec_driver_sql(
        f"CREATE OR REPLACE VIEW reports.{view} AS {changed}", execution_options={"no_parameters": True}
    )
