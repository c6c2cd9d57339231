"""Reports count no reward of an attempt that does not count, and no number that a step did not measure, as the API."""

import re

from alembic import op
from sqlalchemy import text

revision = "20261128_0091"
down_revision = "20261128_0090"
branch_labels = None
depends_on = None

GIVEN = "WHERE external_rewards.rollout_id = rollouts.id"
COUNTED = f"{GIVEN} AND COALESCE(external_rewards.attempt, rollouts.attempt) = rollouts.attempt"

COMPUTED = "COALESCE((steps.metrics ->> 'computed_tokens')::float8, 1) <> 0"
TRAINABLE = "COALESCE((steps.metrics ->> 'trainable_tokens')::float8, 1) <> 0"
# Without a reference the trainer writes a KL of 0.
HELD = """jsonb_path_exists(runs.config, '$."algorithm"."kl_coefficient"?(@ > 0)')"""
MEASURED = {
    **dict.fromkeys(("loss", "gradient_norm", "entropy", "clipped_share", "effective_sample_share"), COMPUTED),
    "kl_reference": f"{COMPUTED} AND {HELD}",
    **dict.fromkeys(("policy_lag_mean", "policy_lag_max"), TRAINABLE),
}


def upgrade() -> None:
    for view in ("rollouts", "rewards"):
        _replace(view, {re.escape(GIVEN): COUNTED})
    _replace(
        "steps", {re.escape(_metric(one)): f"CASE WHEN {of} THEN {_metric(one)} END" for one, of in MEASURED.items()}
    )


def downgrade() -> None:
    known = {
        rf"CASE\s+WHEN (?:(?!CASE).)*? THEN {re.escape(_metric(one))}\s+ELSE NULL::double precision\s+END": _metric(one)
        for one in MEASURED
    }
    _replace("steps", known)
    for view in ("rewards", "rollouts"):
        _replace(view, {re.escape(COUNTED): GIVEN})


def _metric(name: str) -> str:
    return f"(steps.metrics ->> '{name}'::text)::double precision"


def _replace(view: str, changes: dict[str, str]) -> None:
    connection = op.get_bind()
    definition = connection.scalar(text(f"SELECT pg_get_viewdef('reports.{view}'::regclass, true)"))
    for old, new in changes.items():
        definition, count = re.subn(old, new, definition, flags=re.DOTALL)
        if not count:
            raise RuntimeError(f"the view reports.{view} does not contain {old}")
    # The driver's own call: SQLAlchemy would take the colons of the view for parameters.
    connection.exec_driver_sql(
        f"CREATE OR REPLACE VIEW reports.{view} AS {definition}", execution_options={"no_parameters": True}
    )
