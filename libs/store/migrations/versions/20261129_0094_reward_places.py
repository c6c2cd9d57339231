"""A reward of telemetry that lacks its answer or tool call may get it; the rest of it never changes."""

from alembic import op

revision = "20261129_0094"
down_revision = "20261128_0093"
branch_labels = None
depends_on = None

BEFORE = "Writer: collector. A reward from the attempt''s telemetry or its reward endpoint. A repeat changes nothing."
AFTER = (
    "Writer: collector. A reward from the attempt''s telemetry or its reward endpoint. A repeat changes nothing,"
    " except that one of telemetry names the answer or tool call that the first lacked."
)
GUARD = """
CREATE FUNCTION refuse_reward_change() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF TG_OP = 'DELETE' AND EXISTS (SELECT FROM runs WHERE intent = 'deleted' AND id = OLD.run_id) THEN
        RETURN OLD;
    END IF;
    IF TG_OP = 'UPDATE' AND OLD.source = 'telemetry'
        AND (OLD.response_id IS NULL OR NEW.response_id = OLD.response_id)
        AND (OLD.tool_call_id IS NULL OR NEW.tool_call_id = OLD.tool_call_id)
        AND to_jsonb(OLD) - 'response_id' - 'tool_call_id' = to_jsonb(NEW) - 'response_id' - 'tool_call_id'
    THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION '% is append-only: % refused', TG_TABLE_NAME, TG_OP
        USING ERRCODE = 'restrict_violation', TABLE = TG_TABLE_NAME;
END $$
"""


def upgrade() -> None:
    op.execute(GUARD)
    _guard("refuse_reward_change", AFTER)


def downgrade() -> None:
    _guard("refuse_change", BEFORE)
    op.execute("DROP FUNCTION refuse_reward_change")


def _guard(function: str, comment: str) -> None:
    op.execute(
        "CREATE OR REPLACE TRIGGER rewards_append_only BEFORE UPDATE OR DELETE ON rewards"
        f" FOR EACH ROW EXECUTE FUNCTION {function}()"
    )
    op.execute(f"COMMENT ON TABLE rewards IS '{comment}'")
