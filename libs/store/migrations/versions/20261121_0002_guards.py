"""Triggers that hold the promises: allowed transitions only, history that stays, versions without gaps."""

import sqlalchemy as sa
from alembic import op

revision = "20261121_0002"
down_revision = "20261121_0001"
branch_labels = None
depends_on = None

# entity, table, column. Frozen here as every migration is; a test compares with libs.contracts.states.
STATE_COLUMNS = [
    ("run", "run_status", "phase"),
    ("group", "groups", "state"),
    ("rollout", "rollouts", "state"),
    ("attempt", "attempts", "state"),
]
TRANSITIONS = {
    "run": {
        "pending": ["running", "evaluating", "paused", "failed", "cancelled"],
        "running": ["paused", "evaluating", "completed", "failed", "cancelled"],
        "paused": ["running", "evaluating", "failed", "cancelled"],
        "evaluating": ["running", "paused", "completed", "failed", "cancelled"],
        "completed": ["evaluating"],
        "failed": ["running", "cancelled"],
    },
    "group": {"open": ["complete", "cancelled"]},
    "rollout": {"queued": ["finished", "excluded", "cancelled"]},
    "attempt": {"leased": ["running", "settled", "expired"], "running": ["settled", "expired"]},
}
# Tables whose rows are never changed and never removed, except with a run's partitions.
APPEND_ONLY = [
    "outcomes",
    "model_calls",
    "spans",
    "rewards",
    "external_rewards",
    "group_credits",
    "credits",
    "samples",
    "steps",
    "step_groups",
    "step_samples",
]

CHECK_TRANSITION = """
CREATE FUNCTION check_transition() RETURNS trigger LANGUAGE plpgsql AS $$
-- Arguments: entity, state column.
DECLARE
    old_state text := to_jsonb(OLD) ->> TG_ARGV[1];
    new_state text := to_jsonb(NEW) ->> TG_ARGV[1];
BEGIN
    IF NOT EXISTS (
        SELECT FROM state_transitions
        WHERE entity = TG_ARGV[0] AND from_state = old_state AND to_state = new_state
    ) THEN
        RAISE EXCEPTION '% may not go from % to %', TG_ARGV[0], old_state, new_state
            USING ERRCODE = 'check_violation', CONSTRAINT = 'state_transitions', TABLE = TG_TABLE_NAME;
    END IF;
    RETURN NEW;
END $$
"""

REFUSE_CHANGE = """
CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% is append-only: % refused', TG_TABLE_NAME, TG_OP
        USING ERRCODE = 'restrict_violation', TABLE = TG_TABLE_NAME;
END $$
"""

# A repeated version passes on to the primary key, so that ON CONFLICT can answer it.
CHECK_VERSION_GAP = """
CREATE FUNCTION check_version_gap() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    newest integer;
BEGIN
    SELECT max(version) INTO newest FROM policy_versions WHERE run_id = NEW.run_id;
    IF NEW.version < 0 OR NEW.version > coalesce(newest, -1) + 1 THEN
        RAISE EXCEPTION 'policy version % of % would leave a gap: the newest is %',
            NEW.version, NEW.run_id, coalesce(newest::text, 'none')
            USING ERRCODE = 'check_violation', CONSTRAINT = 'policy_versions_no_gaps', TABLE = TG_TABLE_NAME;
    END IF;
    RETURN NEW;
END $$
"""

# Only the mark that the files are gone may be set later.
POLICY_VERSION_FROZEN = """
CREATE TRIGGER policy_versions_frozen BEFORE UPDATE ON policy_versions FOR EACH ROW
WHEN ((to_jsonb(OLD) - 'pruned_at') IS DISTINCT FROM (to_jsonb(NEW) - 'pruned_at'))
EXECUTE FUNCTION refuse_change()
"""


def upgrade() -> None:
    _fill_transitions()
    for function in (CHECK_TRANSITION, REFUSE_CHANGE, CHECK_VERSION_GAP):
        op.execute(function)
    for entity, table, column in STATE_COLUMNS:
        op.execute(
            f"CREATE TRIGGER {table}_transition BEFORE UPDATE OF {column} ON {table} FOR EACH ROW "
            f"WHEN (OLD.{column} IS DISTINCT FROM NEW.{column}) EXECUTE FUNCTION check_transition('{entity}', '{column}')"
        )
    for table in APPEND_ONLY:
        op.execute(
            f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE ON {table} "
            "FOR EACH ROW EXECUTE FUNCTION refuse_change()"
        )
    op.execute(
        "CREATE TRIGGER policy_versions_no_gaps BEFORE INSERT ON policy_versions "
        "FOR EACH ROW EXECUTE FUNCTION check_version_gap()"
    )
    op.execute(POLICY_VERSION_FROZEN)
    op.execute(
        "CREATE TRIGGER policy_versions_kept BEFORE DELETE ON policy_versions "
        "FOR EACH ROW EXECUTE FUNCTION refuse_change()"
    )


def _fill_transitions() -> None:
    table = sa.table("state_transitions", sa.column("entity"), sa.column("from_state"), sa.column("to_state"))
    rows = [
        {"entity": entity, "from_state": old, "to_state": new}
        for entity, states in TRANSITIONS.items()
        for old, allowed in states.items()
        for new in allowed
    ]
    op.bulk_insert(table, rows)


def downgrade() -> None:
    for trigger in ("no_gaps", "frozen", "kept"):
        op.execute(f"DROP TRIGGER policy_versions_{trigger} ON policy_versions")
    for table in APPEND_ONLY:
        op.execute(f"DROP TRIGGER {table}_append_only ON {table}")
    for _, table, _ in STATE_COLUMNS:
        op.execute(f"DROP TRIGGER {table}_transition ON {table}")
    for function in ("check_version_gap", "refuse_change", "check_transition"):
        op.execute(f"DROP FUNCTION {function}()")
    op.execute("DELETE FROM state_transitions")
