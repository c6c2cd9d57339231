"""A view of the policies of runs, and reports that have runs and policies apart."""

from alembic import op
from sqlalchemy import text

revision = "20261126_0060b"
down_revision = "20261126_0060"
branch_labels = None
depends_on = None

# Two halves: a condition on the id or on the run finds an index.
POLICIES = """
    CREATE VIEW policies AS
    SELECT id, id AS run_id, ''::text AS name, steps > 0 AS trains FROM runs WHERE lead_run_id IS NULL
    UNION ALL
    SELECT id, lead_run_id, policy, steps > 0 FROM runs WHERE lead_run_id IS NOT NULL
"""
OF_POLICIES = """
    CREATE VIEW reports.policies AS
    SELECT policies.id AS policy_id, policies.run_id, runs.name AS run_name, nullif(policies.name, '') AS policy,
        run_status.phase, runs.created_at,
        (SELECT max(number) FROM steps WHERE steps.run_id = policies.id) AS steps,
        (SELECT max(version) FROM policy_versions WHERE policy_versions.run_id = policies.id) AS policy_version
    FROM policies JOIN runs ON runs.id = policies.run_id LEFT JOIN run_status ON run_status.run_id = runs.id
"""
COMMENTS = {
    "policies": "Every policy of every run: id is the key of its versions, steps, verdicts and samples, name is empty"
    " for the run''s own model, trains says whether it has steps to make.",
    "reports.policies": "One row for each policy of each run; policy is null for the run''s own model, whose id is the"
    " run''s. Steps and policy versions have the policy_id as run_id.",
}


COLUMNS = {
    "runs.lead_run_id": (
        "The run from whose rollouts this one learns, as one of its policies; null for others.",
        "The run whose further policy this row is, and no run; null for runs.",
    ),
    "group_credits.run_id": (
        "Run of the group, or a run that carries another policy of it.",
        "The policy that learns from the group: the run''s own model, or a further one.",
    ),
}


def upgrade() -> None:
    for column, (_, comment) in COLUMNS.items():
        op.execute(f"COMMENT ON COLUMN {column} IS '{comment}'")
    op.execute(POLICIES)
    op.execute(OF_POLICIES)
    op.execute("GRANT SELECT ON reports.policies TO PUBLIC")
    for view, comment in COMMENTS.items():
        op.execute(f"COMMENT ON VIEW {view} IS '{comment}'")
    _replace_runs(f"{_runs()} WHERE runs.lead_run_id IS NULL")


def downgrade() -> None:
    for column, (comment, _) in COLUMNS.items():
        op.execute(f"COMMENT ON COLUMN {column} IS '{comment}'")
    _replace_runs(_runs().rpartition("WHERE")[0])
    op.execute("DROP VIEW reports.policies, policies")


def _runs() -> str:
    definition = op.get_bind().scalar(text("SELECT pg_get_viewdef('reports.runs'::regclass, true)"))
    return str(definition).rstrip().removesuffix(";")


def _replace_runs(definition: str) -> None:
    op.get_bind().exec_driver_sql(f"CREATE OR REPLACE VIEW reports.runs AS {definition}")
