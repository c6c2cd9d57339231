"""Rewards of steps in dashboards: those that the step's run judged, as the API counts them, without greedy rollouts."""

from alembic import op
from sqlalchemy import text

revision = "20261124_0029"
down_revision = "20261123_0028"
branch_labels = None
depends_on = None

# Both as Postgres prints them.
OF_THE_RUN = """
           FROM reports.rollouts
          WHERE rollouts.run_id = steps.run_id AND rollouts.step = steps.number AND rollouts.state = 'finished'::text"""
OF_THE_STEP = """
           FROM step_groups
             JOIN rollouts siblings ON siblings.group_id = step_groups.group_id AND NOT siblings.greedy
             JOIN reports.rollouts ON rollouts.rollout_id = siblings.id
          WHERE step_groups.run_id = steps.run_id AND step_groups.step = steps.number AND rollouts.state = 'finished'::text"""


def upgrade() -> None:
    _replace(OF_THE_RUN, OF_THE_STEP)


def downgrade() -> None:
    _replace(OF_THE_STEP, OF_THE_RUN)


def _replace(old: str, new: str) -> None:
    connection = op.get_bind()
    definition = connection.scalar(text("SELECT pg_get_viewdef('reports.steps'::regclass, true)"))
    if old not in definition:
        raise RuntimeError(f"the view reports.steps does not contain{old}")
    connection.exec_driver_sql(f"CREATE OR REPLACE VIEW reports.steps AS {definition.replace(old, new)}")
