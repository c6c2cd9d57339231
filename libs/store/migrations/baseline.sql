-- The schema at revision 20261122_0011, the oldest that can be upgraded. Later revisions, beside this file, change it.
-- `tables` has the schema of today and its comments, which `leyden.libs.store.migrate` writes.

-- ============================================================ Tables

-- Access to the REST API

CREATE TABLE api_tokens (
    id text NOT NULL,
    name text NOT NULL,
    token_sha256 bytea NOT NULL,
    scopes text[] NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    revoked_at timestamptz,
    CONSTRAINT pk_api_tokens PRIMARY KEY (id),
    CONSTRAINT uq_api_tokens_token_sha256 UNIQUE (token_sha256)
);

CREATE TABLE idempotency_keys (
    token_id text NOT NULL,
    key text NOT NULL,
    request_sha256 bytea NOT NULL,
    status_code integer NOT NULL,
    body jsonb NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_idempotency_keys PRIMARY KEY (token_id, key)
);

-- Tasks

CREATE TABLE datasets (
    id text NOT NULL,
    name text NOT NULL,
    content_sha256 text NOT NULL,
    task_count integer NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_datasets PRIMARY KEY (id),
    CONSTRAINT uq_datasets_name UNIQUE (name)
);

CREATE TABLE tasks (
    dataset_id text NOT NULL,
    number integer NOT NULL,
    row_sha256 bytea NOT NULL,
    payload jsonb NOT NULL,
    CONSTRAINT pk_tasks PRIMARY KEY (dataset_id, number),
    CONSTRAINT fk_tasks_dataset_id_datasets FOREIGN KEY (dataset_id) REFERENCES datasets(id) ON DELETE CASCADE
);

-- Runs and evaluations

CREATE TABLE runs (
    id text NOT NULL,
    name text NOT NULL,
    config jsonb NOT NULL,
    dataset_id text NOT NULL,
    intent text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_runs PRIMARY KEY (id),
    CONSTRAINT fk_runs_dataset_id_datasets FOREIGN KEY (dataset_id) REFERENCES datasets(id),
    CONSTRAINT ck_runs_intent_known CHECK (intent IN ('running', 'paused', 'cancelled'))
);
CREATE INDEX ix_runs_created_at_id ON runs (created_at, id);

CREATE TABLE run_status (
    run_id text NOT NULL,
    phase text NOT NULL,
    reason text,
    started_at timestamptz,
    finished_at timestamptz,
    updated_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_run_status PRIMARY KEY (run_id),
    CONSTRAINT fk_run_status_run_id_runs FOREIGN KEY (run_id) REFERENCES runs(id),
    CONSTRAINT ck_run_status_phase_known CHECK (phase IN ('pending', 'running', 'paused', 'evaluating', 'completed', 'failed', 'cancelled'))
);

CREATE TABLE evaluations (
    id text NOT NULL,
    run_id text NOT NULL,
    number integer NOT NULL,
    dataset_id text NOT NULL,
    policy_version integer,
    rollouts_per_task integer NOT NULL,
    max_tasks integer,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_evaluations PRIMARY KEY (id),
    CONSTRAINT uq_evaluations_run_id_number UNIQUE (run_id, number),
    CONSTRAINT fk_evaluations_dataset_id_datasets FOREIGN KEY (dataset_id) REFERENCES datasets(id),
    CONSTRAINT fk_evaluations_run_id_runs FOREIGN KEY (run_id) REFERENCES runs(id)
);

-- Groups of sibling rollouts, and the attempts at each

CREATE TABLE groups (
    id text NOT NULL,
    run_id text NOT NULL,
    evaluation_id text,
    number integer NOT NULL,
    dataset_id text NOT NULL,
    task_number integer NOT NULL,
    size integer NOT NULL,
    admitted_version integer NOT NULL,
    state text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    finished_at timestamptz,
    CONSTRAINT pk_groups PRIMARY KEY (id),
    CONSTRAINT uq_groups_run_id_evaluation_id_number UNIQUE NULLS NOT DISTINCT (run_id, evaluation_id, number),
    CONSTRAINT fk_groups_evaluation_id_evaluations FOREIGN KEY (evaluation_id) REFERENCES evaluations(id),
    CONSTRAINT fk_groups_run_id_runs FOREIGN KEY (run_id) REFERENCES runs(id),
    CONSTRAINT ck_groups_state_known CHECK (state IN ('open', 'complete', 'cancelled'))
);
CREATE INDEX ix_groups_cancelled ON groups (run_id) WHERE state = 'cancelled' AND evaluation_id IS NULL;
CREATE INDEX ix_groups_complete ON groups (finished_at) WHERE state = 'complete' AND evaluation_id IS NULL;
CREATE INDEX ix_groups_run_id_created_at ON groups (run_id, created_at);
CREATE INDEX ix_groups_run_open ON groups (run_id) WHERE state = 'open';
CREATE INDEX ix_groups_training ON groups (run_id, number) WHERE evaluation_id IS NULL;

CREATE TABLE rollouts (
    id text NOT NULL,
    run_id text NOT NULL,
    group_id text NOT NULL,
    sibling integer NOT NULL,
    state text NOT NULL,
    attempt integer,
    reward double precision,
    reason text,
    trace_parent text,
    created_at timestamptz NOT NULL DEFAULT now(),
    finished_at timestamptz,
    CONSTRAINT pk_rollouts PRIMARY KEY (id),
    CONSTRAINT uq_rollouts_group_id_sibling UNIQUE (group_id, sibling),
    CONSTRAINT fk_rollouts_group_id_groups FOREIGN KEY (group_id) REFERENCES groups(id),
    CONSTRAINT fk_rollouts_run_id_runs FOREIGN KEY (run_id) REFERENCES runs(id),
    CONSTRAINT ck_rollouts_state_known CHECK (state IN ('queued', 'finished', 'excluded', 'cancelled'))
);
CREATE INDEX ix_rollouts_queued ON rollouts (run_id, created_at) WHERE state = 'queued';
CREATE INDEX ix_rollouts_run_id_created_at_id ON rollouts (run_id, created_at, id);
CREATE INDEX ix_rollouts_uncounted ON rollouts (run_id) WHERE state IN ('excluded', 'cancelled');

CREATE TABLE attempts (
    rollout_id text NOT NULL,
    number integer NOT NULL,
    run_id text NOT NULL,
    state text NOT NULL,
    lease_id text NOT NULL,
    owner text NOT NULL,
    lease_expires_at timestamptz NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    started_at timestamptz,
    finished_at timestamptz,
    CONSTRAINT pk_attempts PRIMARY KEY (rollout_id, number),
    CONSTRAINT uq_attempts_lease_id UNIQUE (lease_id),
    CONSTRAINT fk_attempts_rollout_id_rollouts FOREIGN KEY (rollout_id) REFERENCES rollouts(id),
    CONSTRAINT ck_attempts_state_known CHECK (state IN ('leased', 'running', 'settled', 'expired'))
);
CREATE INDEX ix_attempts_expiry ON attempts (lease_expires_at) WHERE state IN ('leased', 'running');
CREATE UNIQUE INDEX uq_attempts_live ON attempts (rollout_id) WHERE state IN ('leased', 'running');

CREATE TABLE outcomes (
    rollout_id text NOT NULL,
    attempt integer NOT NULL,
    run_id text NOT NULL,
    kind text NOT NULL,
    reward double precision,
    facts jsonb NOT NULL,
    exit_code integer,
    detail text,
    stdout_tail text NOT NULL,
    stderr_tail text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_outcomes PRIMARY KEY (rollout_id, attempt),
    CONSTRAINT ck_outcomes_kind_known CHECK (kind IN ('succeeded', 'agent_error', 'timeout', 'infra_error', 'cancelled')),
    CONSTRAINT ck_outcomes_reward_finite CHECK (reward > '-Infinity' AND reward < 'Infinity')
);
CREATE INDEX ix_outcomes_run_id_created_at ON outcomes (run_id, created_at);

-- What the gateway and the collector record of an attempt

CREATE TABLE model_calls (
    run_id text NOT NULL,
    id text NOT NULL,
    rollout_id text NOT NULL,
    attempt integer NOT NULL,
    request_id text NOT NULL,
    choice integer NOT NULL,
    sequence bigint NOT NULL,
    status text NOT NULL,
    trainable boolean NOT NULL,
    untrainable_reason text,
    request_sha256 bytea NOT NULL,
    request jsonb NOT NULL,
    messages jsonb NOT NULL,
    response jsonb,
    prompt_ids bytea NOT NULL,
    sampled_ids bytea NOT NULL,
    generator_logprobs bytea NOT NULL,
    policy_versions bytea NOT NULL,
    prompt_tokens integer NOT NULL,
    completion_tokens integer NOT NULL,
    cached_tokens integer NOT NULL,
    min_policy_version integer,
    max_policy_version integer,
    temperature double precision NOT NULL,
    finish_reason text,
    trace_id text,
    parent_span_id text,
    queued_seconds double precision NOT NULL,
    first_token_seconds double precision,
    total_seconds double precision NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    continues text,
    kept_messages integer,
    kept_tokens integer,
    CONSTRAINT pk_model_calls PRIMARY KEY (run_id, id),
    CONSTRAINT ck_model_calls_status_known CHECK (status IN ('completed', 'aborted', 'failed'))
) PARTITION BY LIST (run_id);
CREATE INDEX ix_model_calls_rollout ON model_calls (rollout_id, attempt, sequence);

CREATE TABLE spans (
    run_id text NOT NULL,
    rollout_id text NOT NULL,
    attempt integer NOT NULL,
    trace_id text NOT NULL,
    span_id text NOT NULL,
    parent_span_id text,
    name text NOT NULL,
    kind text NOT NULL,
    tool text,
    status text NOT NULL,
    error_type text,
    tool_call_id text,
    response_id text,
    start_ns bigint NOT NULL,
    end_ns bigint NOT NULL,
    scope text,
    attributes jsonb NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_spans PRIMARY KEY (run_id, rollout_id, attempt, trace_id, span_id),
    CONSTRAINT ck_spans_status_known CHECK (status IN ('ok', 'error', 'unset'))
) PARTITION BY LIST (run_id);

CREATE TABLE rewards (
    rollout_id text NOT NULL,
    attempt integer NOT NULL,
    key text NOT NULL,
    run_id text NOT NULL,
    source text NOT NULL,
    name text NOT NULL,
    value double precision NOT NULL,
    response_id text,
    tool_call_id text,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_rewards PRIMARY KEY (rollout_id, attempt, key),
    CONSTRAINT ck_rewards_value_finite CHECK (value > '-Infinity' AND value < 'Infinity')
);

CREATE TABLE external_rewards (
    rollout_id text NOT NULL,
    key text NOT NULL,
    name text NOT NULL,
    value double precision NOT NULL,
    call_id text,
    comment text,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_external_rewards PRIMARY KEY (rollout_id, key),
    CONSTRAINT fk_external_rewards_rollout_id_rollouts FOREIGN KEY (rollout_id) REFERENCES rollouts(id),
    CONSTRAINT ck_external_rewards_value_finite CHECK (value > '-Infinity' AND value < 'Infinity')
);

-- Credit and samples

CREATE TABLE group_credits (
    group_id text NOT NULL,
    run_id text NOT NULL,
    verdict text NOT NULL,
    reason text,
    credit_version integer NOT NULL,
    counted_siblings integer NOT NULL,
    has_variance boolean NOT NULL,
    min_policy_version integer,
    reward_mean double precision,
    reward_std double precision,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_group_credits PRIMARY KEY (group_id),
    CONSTRAINT fk_group_credits_group_id_groups FOREIGN KEY (group_id) REFERENCES groups(id),
    CONSTRAINT ck_group_credits_verdict_known CHECK (verdict IN ('credited', 'excluded'))
);
CREATE INDEX ix_group_credits_excluded ON group_credits (run_id) WHERE verdict = 'excluded';
CREATE INDEX ix_group_credits_run_id_created_at ON group_credits (run_id, created_at);

CREATE TABLE credits (
    run_id text NOT NULL,
    call_id text NOT NULL,
    rollout_id text NOT NULL,
    parent_call_id text,
    depth integer NOT NULL,
    state_key text NOT NULL,
    tools jsonb NOT NULL,
    intermediate_reward double precision NOT NULL,
    return double precision NOT NULL,
    baseline double precision NOT NULL,
    advantage double precision NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_credits PRIMARY KEY (run_id, call_id)
) PARTITION BY LIST (run_id);
CREATE INDEX ix_credits_rollout ON credits (rollout_id);

CREATE TABLE samples (
    run_id text NOT NULL,
    id text NOT NULL,
    group_id text NOT NULL,
    rollout_id text NOT NULL,
    branch integer NOT NULL,
    length integer NOT NULL,
    trained_tokens integer NOT NULL,
    token_ids bytea NOT NULL,
    mask bytea NOT NULL,
    generator_logprobs bytea NOT NULL,
    advantages bytea NOT NULL,
    temperatures bytea NOT NULL,
    policy_versions bytea NOT NULL,
    min_policy_version integer NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_samples PRIMARY KEY (run_id, id)
) PARTITION BY LIST (run_id);
CREATE INDEX ix_samples_group ON samples (group_id);

-- Training

CREATE TABLE steps (
    run_id text NOT NULL,
    number integer NOT NULL,
    metrics jsonb NOT NULL,
    checkpoint text NOT NULL,
    started_at timestamptz NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_steps PRIMARY KEY (run_id, number),
    CONSTRAINT fk_steps_run_id_runs FOREIGN KEY (run_id) REFERENCES runs(id)
);

CREATE TABLE step_groups (
    group_id text NOT NULL,
    run_id text NOT NULL,
    step integer,
    verdict text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_step_groups PRIMARY KEY (group_id),
    CONSTRAINT fk_step_groups_group_id_groups FOREIGN KEY (group_id) REFERENCES groups(id),
    CONSTRAINT ck_step_groups_verdict_known CHECK (verdict IN ('trained', 'no_variance', 'stale'))
);
CREATE INDEX ix_step_groups_run_id_step ON step_groups (run_id, step);
CREATE INDEX ix_step_groups_stale ON step_groups (run_id) WHERE verdict = 'stale';

CREATE TABLE step_samples (
    run_id text NOT NULL,
    sample_id text NOT NULL,
    step integer NOT NULL,
    CONSTRAINT pk_step_samples PRIMARY KEY (run_id, sample_id)
);
CREATE INDEX ix_step_samples_run_id_step ON step_samples (run_id, step);

CREATE TABLE policy_versions (
    run_id text NOT NULL,
    version integer NOT NULL,
    path text NOT NULL,
    content_sha256 text NOT NULL,
    size_bytes bigint NOT NULL,
    pruned_at timestamptz,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_policy_versions PRIMARY KEY (run_id, version),
    CONSTRAINT fk_policy_versions_run_id_runs FOREIGN KEY (run_id) REFERENCES runs(id)
);

-- Engines

CREATE TABLE engines (
    url text NOT NULL,
    run_id text,
    policy_version integer,
    state text NOT NULL,
    detail text,
    updated_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_engines PRIMARY KEY (url),
    CONSTRAINT ck_engines_state_known CHECK (state IN ('serving', 'updating', 'unreachable'))
);

-- States: the triggers below allow these transitions alone

CREATE TABLE state_transitions (
    entity text NOT NULL,
    from_state text NOT NULL,
    to_state text NOT NULL,
    CONSTRAINT pk_state_transitions PRIMARY KEY (entity, from_state, to_state)
);

-- ============================================================ Storage

-- Token arrays do not compress well. The other byte columns repeat one value, and stay compressed.
ALTER TABLE model_calls
    ALTER prompt_ids SET STORAGE EXTERNAL,
    ALTER sampled_ids SET STORAGE EXTERNAL,
    ALTER generator_logprobs SET STORAGE EXTERNAL;
ALTER TABLE samples
    ALTER token_ids SET STORAGE EXTERNAL,
    ALTER generator_logprobs SET STORAGE EXTERNAL;

-- Why: Postgres' own compression took two thirds of the time of recording a call. Some builds of Postgres lack lz4.
DO $$
BEGIN
    ALTER TABLE model_calls ALTER messages SET COMPRESSION lz4, ALTER response SET COMPRESSION lz4;
EXCEPTION WHEN feature_not_supported THEN
    ALTER TABLE model_calls ALTER messages SET STORAGE EXTERNAL, ALTER response SET STORAGE EXTERNAL;
END $$;

-- ============================================================ Guards

-- A state changes along its table of transitions alone. A test compares these rows with libs/contracts/states.py.

INSERT INTO state_transitions (entity, from_state, to_state) VALUES
    ('run', 'pending', 'running'),
    ('run', 'pending', 'evaluating'),
    ('run', 'pending', 'paused'),
    ('run', 'pending', 'failed'),
    ('run', 'pending', 'cancelled'),
    ('run', 'running', 'paused'),
    ('run', 'running', 'evaluating'),
    ('run', 'running', 'completed'),
    ('run', 'running', 'failed'),
    ('run', 'running', 'cancelled'),
    ('run', 'paused', 'running'),
    ('run', 'paused', 'evaluating'),
    ('run', 'paused', 'failed'),
    ('run', 'paused', 'cancelled'),
    ('run', 'evaluating', 'running'),
    ('run', 'evaluating', 'paused'),
    ('run', 'evaluating', 'completed'),
    ('run', 'evaluating', 'failed'),
    ('run', 'evaluating', 'cancelled'),
    ('run', 'completed', 'evaluating'),
    ('run', 'failed', 'running'),
    ('run', 'failed', 'cancelled'),
    ('group', 'open', 'complete'),
    ('group', 'open', 'cancelled'),
    ('rollout', 'queued', 'finished'),
    ('rollout', 'queued', 'excluded'),
    ('rollout', 'queued', 'cancelled'),
    ('attempt', 'leased', 'running'),
    ('attempt', 'leased', 'settled'),
    ('attempt', 'leased', 'expired'),
    ('attempt', 'running', 'settled'),
    ('attempt', 'running', 'expired');

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
END $$;
CREATE TRIGGER run_status_transition BEFORE UPDATE OF phase ON run_status FOR EACH ROW
    WHEN (OLD.phase IS DISTINCT FROM NEW.phase) EXECUTE FUNCTION check_transition('run', 'phase');
CREATE TRIGGER groups_transition BEFORE UPDATE OF state ON groups FOR EACH ROW
    WHEN (OLD.state IS DISTINCT FROM NEW.state) EXECUTE FUNCTION check_transition('group', 'state');
CREATE TRIGGER rollouts_transition BEFORE UPDATE OF state ON rollouts FOR EACH ROW
    WHEN (OLD.state IS DISTINCT FROM NEW.state) EXECUTE FUNCTION check_transition('rollout', 'state');
CREATE TRIGGER attempts_transition BEFORE UPDATE OF state ON attempts FOR EACH ROW
    WHEN (OLD.state IS DISTINCT FROM NEW.state) EXECUTE FUNCTION check_transition('attempt', 'state');

-- History stays: these rows never change and never go, except with the partitions of a run.

CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% is append-only: % refused', TG_TABLE_NAME, TG_OP
        USING ERRCODE = 'restrict_violation', TABLE = TG_TABLE_NAME;
END $$;
CREATE TRIGGER model_calls_append_only BEFORE UPDATE OR DELETE ON model_calls
    FOR EACH ROW EXECUTE FUNCTION refuse_change();
CREATE TRIGGER spans_append_only BEFORE UPDATE OR DELETE ON spans
    FOR EACH ROW EXECUTE FUNCTION refuse_change();
CREATE TRIGGER rewards_append_only BEFORE UPDATE OR DELETE ON rewards
    FOR EACH ROW EXECUTE FUNCTION refuse_change();
CREATE TRIGGER external_rewards_append_only BEFORE UPDATE OR DELETE ON external_rewards
    FOR EACH ROW EXECUTE FUNCTION refuse_change();
CREATE TRIGGER group_credits_append_only BEFORE UPDATE OR DELETE ON group_credits
    FOR EACH ROW EXECUTE FUNCTION refuse_change();
CREATE TRIGGER credits_append_only BEFORE UPDATE OR DELETE ON credits
    FOR EACH ROW EXECUTE FUNCTION refuse_change();
CREATE TRIGGER samples_append_only BEFORE UPDATE OR DELETE ON samples
    FOR EACH ROW EXECUTE FUNCTION refuse_change();
CREATE TRIGGER steps_append_only BEFORE UPDATE OR DELETE ON steps
    FOR EACH ROW EXECUTE FUNCTION refuse_change();
CREATE TRIGGER step_groups_append_only BEFORE UPDATE OR DELETE ON step_groups
    FOR EACH ROW EXECUTE FUNCTION refuse_change();
CREATE TRIGGER step_samples_append_only BEFORE UPDATE OR DELETE ON step_samples
    FOR EACH ROW EXECUTE FUNCTION refuse_change();

-- An outcome may lose the ends of the agent's output; the rest of it never changes.
CREATE FUNCTION refuse_outcome_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'UPDATE' AND NEW.stdout_tail = '' AND NEW.stderr_tail = ''
        AND to_jsonb(OLD) - 'stdout_tail' - 'stderr_tail' = to_jsonb(NEW) - 'stdout_tail' - 'stderr_tail'
    THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION '% is append-only: % refused', TG_TABLE_NAME, TG_OP
        USING ERRCODE = 'restrict_violation', TABLE = TG_TABLE_NAME;
END $$;
CREATE TRIGGER outcomes_append_only BEFORE UPDATE OR DELETE ON outcomes
    FOR EACH ROW EXECUTE FUNCTION refuse_outcome_change();

-- Policy versions have no gaps. A repeated version reaches the primary key, so that ON CONFLICT can answer it.
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
END $$;
CREATE TRIGGER policy_versions_no_gaps BEFORE INSERT ON policy_versions
    FOR EACH ROW EXECUTE FUNCTION check_version_gap();

-- A policy version never changes, except for the mark that its files are gone.
CREATE TRIGGER policy_versions_frozen BEFORE UPDATE ON policy_versions FOR EACH ROW
    WHEN ((to_jsonb(OLD) - 'pruned_at') IS DISTINCT FROM (to_jsonb(NEW) - 'pruned_at'))
    EXECUTE FUNCTION refuse_change();
CREATE TRIGGER policy_versions_kept BEFORE DELETE ON policy_versions
    FOR EACH ROW EXECUTE FUNCTION refuse_change();

-- ============================================================ Pruning

-- Drops the partitions of an ended run and returns the bytes freed. It locks the rows of the run, so that no evaluation
-- begins meanwhile, then the parents of the partitions in the order in which credit uses them. Dropping a partition
-- locks its parent too: for no longer than the catalog takes, and after a wait of one second at most.
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
END $$;
