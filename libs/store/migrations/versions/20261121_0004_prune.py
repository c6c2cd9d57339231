"""Pruning: an ended run's big data goes in one statement, and outcomes may lose the ends of agents' outputs."""

from alembic import op

revision = "20261121_0004"
down_revision = "20261121_0002"
branch_labels = None
depends_on = None

# Only the texts may be emptied later; what the agent earned and reported stays as it was.
OUTCOMES_FROZEN = """
CREATE TRIGGER outcomes_append_only BEFORE UPDATE OR DELETE ON outcomes FOR EACH ROW
EXECUTE FUNCTION refuse_outcome_change()
"""
REFUSE_OUTCOME_CHANGE = """
CREATE FUNCTION refuse_outcome_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'UPDATE' AND NEW.stdout_tail = '' AND NEW.stderr_tail = ''
        AND to_jsonb(OLD) - 'stdout_tail' - 'stderr_tail' = to_jsonb(NEW) - 'stdout_tail' - 'stderr_tail'
    THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION '% is append-only: % refused', TG_TABLE_NAME, TG_OP
        USING ERRCODE = 'restrict_violation', TABLE = TG_TABLE_NAME;
END $$
"""
OUTCOMES_APPEND_ONLY = """
CREATE TRIGGER outcomes_append_only BEFORE UPDATE OR DELETE ON outcomes FOR EACH ROW EXECUTE FUNCTION refuse_change()
"""

# Locks the run's rows, so that no evaluation begins meanwhile, then the parents in the order in which credit uses them.
# A partition's parent must be locked too: for no longer than the catalog takes, and never waited for in front of others.
PRUNE_RUN = """
CREATE FUNCTION prune_run(ended text) RETURNS bigint LANGUAGE plpgsql SET lock_timeout = '1s' AS $$
DECLARE
    parents CONSTANT text[] := ARRAY['model_calls', 'spans', 'credits', 'samples'];
    partitions regclass[];
    freed bigint;
BEGIN
    PERFORM FROM runs WHERE id = ended FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'no run has the id %', ended USING ERRCODE = 'no_data_found';
    END IF;
    PERFORM FROM run_status WHERE run_id = ended AND phase IN ('completed', 'failed', 'cancelled') FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'run % has not ended', ended USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    IF EXISTS (
        SELECT FROM evaluations e JOIN datasets d ON d.id = e.dataset_id JOIN run_status s ON s.run_id = e.run_id
        WHERE e.run_id = ended AND s.phase = 'completed' AND least(d.task_count, e.max_tasks) > (
            SELECT count(*) FROM groups g WHERE g.run_id = ended AND g.evaluation_id = e.id AND g.state <> 'open')
    ) THEN
        RAISE EXCEPTION 'run % has an evaluation to do', ended USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    SELECT array_agg(part), coalesce(sum(pg_total_relation_size(part)), 0) INTO partitions, freed
    FROM unnest(parents) AS parent CROSS JOIN to_regclass(format('%I', parent || '__' || ended)) AS part
    WHERE part IS NOT NULL;
    IF partitions IS NOT NULL THEN
        LOCK TABLE ONLY model_calls, ONLY spans, ONLY credits, ONLY samples IN ACCESS EXCLUSIVE MODE;
        EXECUTE 'DROP TABLE ' || (SELECT string_agg(one::text, ', ') FROM unnest(partitions) AS one);
    END IF;
    RETURN freed;
END $$
"""


WRITER = "Writer: runner, in the transaction that settles the attempt."


def upgrade() -> None:
    op.execute("DROP TRIGGER outcomes_append_only ON outcomes")
    for statement in (REFUSE_OUTCOME_CHANGE, OUTCOMES_FROZEN, PRUNE_RUN):
        op.execute(statement)
    op.create_table_comment(
        "outcomes", f"{WRITER} Pruning the run empties its texts.", existing_comment=WRITER, schema=None
    )


def downgrade() -> None:
    op.execute("DROP TRIGGER outcomes_append_only ON outcomes")
    op.execute(OUTCOMES_APPEND_ONLY)
    op.create_table_comment("outcomes", WRITER)
    for function in ("prune_run(text)", "refuse_outcome_change()"):
        op.execute(f"DROP FUNCTION {function}")
