-- Views for dashboards. A role needs no right but LOGIN: it reads these and no table.
-- A later migration may add columns and views; it renames and removes none.
CREATE SCHEMA reports;

CREATE VIEW reports.runs AS
SELECT runs.id AS run_id, runs.name AS run_name, run_status.phase, run_status.reason, runs.created_at,
    run_status.started_at, run_status.finished_at,
    (SELECT max(number) FROM steps WHERE steps.run_id = runs.id) AS steps,
    (SELECT max(version) FROM policy_versions WHERE policy_versions.run_id = runs.id) AS policy_version
FROM runs LEFT JOIN run_status ON run_status.run_id = runs.id;
COMMENT ON VIEW reports.runs IS 'One row for each run, with its phase and the number of its last step.';

CREATE VIEW reports.rollouts AS
SELECT rollouts.run_id, runs.name AS run_name, rollouts.id AS rollout_id, rollouts.group_id, groups.evaluation_id,
    step_groups.step, rollouts.state, rollouts.reason,
    rollouts.reward
        + coalesce((SELECT sum(value) FROM rewards
            WHERE rollout_id = rollouts.id AND attempt = rollouts.attempt), 0)
        + coalesce((SELECT sum(value) FROM external_rewards WHERE rollout_id = rollouts.id), 0) AS reward,
    rollouts.created_at, tried.started_at, rollouts.finished_at, coalesce(tried.attempts, 0) AS attempts,
    extract(epoch FROM tried.started_at - rollouts.created_at)::float8 AS queue_seconds,
    extract(epoch FROM rollouts.finished_at - tried.started_at)::float8 AS work_seconds
FROM rollouts
JOIN runs ON runs.id = rollouts.run_id
JOIN groups ON groups.id = rollouts.group_id
LEFT JOIN step_groups ON step_groups.group_id = rollouts.group_id
LEFT JOIN LATERAL (
    SELECT count(*) AS attempts, min(attempts.started_at) AS started_at FROM attempts
    WHERE attempts.rollout_id = rollouts.id
) AS tried ON true;
COMMENT ON VIEW reports.rollouts IS
    'One row for each rollout: its state, its reward from every source, its waiting and working time in seconds.';

CREATE VIEW reports.steps AS
SELECT steps.run_id, runs.name AS run_name, steps.number AS step, steps.created_at,
    earned.rollouts, earned.reward_mean, earned.reward_std, earned.success_share, verdicts.group_reward_std,
    verdicts.groups_with_variance_share,
    (steps.metrics->>'loss')::float8 AS loss,
    (steps.metrics->>'gradient_norm')::float8 AS gradient_norm,
    (steps.metrics->>'learning_rate')::float8 AS learning_rate,
    (steps.metrics->>'entropy')::float8 AS entropy,
    (steps.metrics->>'kl_reference')::float8 AS kl_reference,
    (steps.metrics->>'clipped_share')::float8 AS clipped_share,
    (steps.metrics->>'policy_lag_mean')::float8 AS policy_lag_mean,
    (steps.metrics->>'policy_lag_max')::float8 AS policy_lag_max,
    (steps.metrics->>'logprob_gap_mean')::float8 AS logprob_gap_mean,
    (steps.metrics->>'effective_sample_share')::float8 AS effective_sample_share,
    (steps.metrics->>'trained_tokens')::float8 AS trained_tokens,
    (steps.metrics->>'trained_tokens')::float8 / nullif((steps.metrics->>'step_seconds')::float8, 0)
        AS trained_tokens_per_second,
    (steps.metrics->>'load_seconds')::float8 AS load_seconds,
    (steps.metrics->>'gradients_seconds')::float8 AS gradients_seconds,
    (steps.metrics->>'optimizer_seconds')::float8 AS optimizer_seconds,
    (steps.metrics->>'export_seconds')::float8 AS export_seconds,
    (steps.metrics->>'step_seconds')::float8 AS step_seconds
FROM steps
JOIN runs ON runs.id = steps.run_id
LEFT JOIN LATERAL (
    SELECT count(*) AS rollouts, avg(rollouts.reward) AS reward_mean, stddev_samp(rollouts.reward) AS reward_std,
        avg((rollouts.reward > 0)::int)::float8 AS success_share
    FROM reports.rollouts
    WHERE rollouts.run_id = steps.run_id AND rollouts.step = steps.number AND rollouts.state = 'finished'
) AS earned ON true
LEFT JOIN LATERAL (
    SELECT avg(group_credits.reward_std) AS group_reward_std,
        avg(group_credits.has_variance::int)::float8 AS groups_with_variance_share
    FROM step_groups JOIN group_credits ON group_credits.group_id = step_groups.group_id
    WHERE step_groups.run_id = steps.run_id AND step_groups.step = steps.number
) AS verdicts ON true;
COMMENT ON VIEW reports.steps IS
    'One row for each optimiser step: rewards of its rollouts, the trainer''s metrics, seconds of each phase.';

CREATE VIEW reports.rewards AS
SELECT rollouts.run_id, step_groups.step, rollouts.id AS rollout_id, given.source, given.name, given.value,
    given.created_at
FROM rollouts
LEFT JOIN step_groups ON step_groups.group_id = rollouts.group_id
CROSS JOIN LATERAL (
    SELECT 'outcome' AS source, 'reward' AS name, rollouts.reward AS value, rollouts.finished_at AS created_at
        WHERE rollouts.reward IS NOT NULL
    UNION ALL
    SELECT source, name, value, created_at FROM rewards
        WHERE rollout_id = rollouts.id AND attempt = rollouts.attempt
    UNION ALL
    SELECT 'api', name, value, created_at FROM external_rewards WHERE rollout_id = rollouts.id
) AS given;
COMMENT ON VIEW reports.rewards IS
    'One row for each part of a rollout''s reward. source: outcome (printed), endpoint, telemetry or api.';

CREATE VIEW reports.credits AS
SELECT credits.run_id, step_groups.step, credits.rollout_id, credits.call_id, credits.intermediate_reward,
    credits.return, credits.baseline, credits.advantage, credits.created_at
FROM credits
JOIN rollouts ON rollouts.id = credits.rollout_id
LEFT JOIN step_groups ON step_groups.group_id = rollouts.group_id;
COMMENT ON VIEW reports.credits IS 'One row for each credited model call. Pruning a run removes its rows.';

CREATE VIEW reports.attempts AS
SELECT attempts.run_id, attempts.rollout_id, attempts.number AS attempt, attempts.state, outcomes.kind,
    outcomes.detail, attempts.created_at, attempts.started_at, attempts.finished_at
FROM attempts
LEFT JOIN outcomes ON outcomes.rollout_id = attempts.rollout_id AND outcomes.attempt = attempts.number;
COMMENT ON VIEW reports.attempts IS
    'One row for each execution of a rollout. kind: succeeded, agent_error, timeout, infra_error or cancelled.';

CREATE VIEW reports.policy_versions AS
SELECT run_id, version, size_bytes, pruned_at, created_at FROM policy_versions;
COMMENT ON VIEW reports.policy_versions IS 'One row for each policy version; pruned_at: when its files were removed.';

CREATE VIEW reports.engines AS SELECT url, run_id, policy_version, state, detail, updated_at FROM engines;
COMMENT ON VIEW reports.engines IS 'One row for each engine, as the controller polled it last.';

CREATE VIEW reports.storage AS
SELECT coalesce(parent.inhparent, tables.oid)::regclass::text AS table_name,
    sum(pg_total_relation_size(tables.oid))::float8 AS bytes
FROM pg_class AS tables
LEFT JOIN pg_inherits AS parent ON parent.inhrelid = tables.oid
WHERE tables.relkind IN ('r', 'm') AND tables.relnamespace = 'public'::regnamespace
GROUP BY 1;
COMMENT ON VIEW reports.storage IS 'Bytes of each table with its indexes; partitions count for their table.';

GRANT USAGE ON SCHEMA reports TO PUBLIC;
GRANT SELECT ON ALL TABLES IN SCHEMA reports TO PUBLIC;
