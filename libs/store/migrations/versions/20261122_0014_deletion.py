"""A run that an administrator deletes may lose its rows: its intent is `deleted`, and the append-only guards pass it."""

from alembic import op

revision = "20261122_0014"
down_revision = "20261122_0013"
branch_labels = None
depends_on = None

INTENTS = ("running", "paused", "cancelled")
# The rows of external rewards name their run in the rollout's id alone.
IF_DELETED = """
    IF TG_OP = 'DELETE' AND EXISTS (
        SELECT FROM runs WHERE intent = 'deleted'
            AND id = coalesce(to_jsonb(OLD) ->> 'run_id', split_part(to_jsonb(OLD) ->> 'rollout_id', '.', 1))
    ) THEN
        RETURN OLD;
    END IF;"""
REFUSE = """
    RAISE EXCEPTION '% is append-only: % refused', TG_TABLE_NAME, TG_OP
        USING ERRCODE = 'restrict_violation', TABLE = TG_TABLE_NAME;"""
EMPTY_OUTPUTS = """
    IF TG_OP = 'UPDATE' AND NEW.stdout_tail = '' AND NEW.stderr_tail = ''
        AND to_jsonb(OLD) - 'stdout_tail' - 'stderr_tail' = to_jsonb(NEW) - 'stdout_tail' - 'stderr_tail'
    THEN
        RETURN NEW;
    END IF;"""
# A deleted run does no evaluation, so none may keep its records.
OPEN_EVALUATION = "s.phase = 'completed' AND "
NOT_DELETED = "NOT EXISTS (SELECT FROM runs WHERE id = ended AND intent = 'deleted') AND "


def upgrade() -> None:
    _write_guards(IF_DELETED)
    _replace_in_prune_run(OPEN_EVALUATION, OPEN_EVALUATION + NOT_DELETED)
    _check_intents(*INTENTS, "deleted")


def downgrade() -> None:
    op.execute("UPDATE runs SET intent = 'cancelled' WHERE intent = 'deleted'")
    _check_intents(*INTENTS)
    _replace_in_prune_run(OPEN_EVALUATION + NOT_DELETED, OPEN_EVALUATION)
    _write_guards("")


def _write_guards(passing: str) -> None:
    for name, body in (("refuse_change", passing), ("refuse_outcome_change", passing + EMPTY_OUTPUTS)):
        op.execute(
            f"CREATE OR REPLACE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN{body}{REFUSE} END $$"
        )


def _replace_in_prune_run(old: str, new: str) -> None:
    op.execute(
        f"DO $do$ BEGIN EXECUTE replace(pg_get_functiondef('prune_run'::regproc), $${old}$$, $${new}$$); END $do$"
    )


def _check_intents(*intents: str) -> None:
    known = ", ".join(f"'{intent}'" for intent in intents)
    op.execute("ALTER TABLE runs DROP CONSTRAINT ck_runs_intent_known")
    op.execute(f"ALTER TABLE runs ADD CONSTRAINT ck_runs_intent_known CHECK (intent IN ({known}))")
