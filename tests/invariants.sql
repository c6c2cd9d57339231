-- What the store must say of a run after anything was killed. Every row that a question returns is a broken promise.
--
--     python -m tests.invariants DSN RUN           every question with its rows; exit status 1 when there are any
--     psql DSN -v run=RUN -f tests/invariants.sql  the same by hand
--
-- The run should be over: what is still under way is told as not terminal.

CREATE OR REPLACE FUNCTION pg_temp.int32s(packed bytea) RETURNS integer[] LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(array_agg(get_byte(packed, i) | (get_byte(packed, i + 1) << 8) | (get_byte(packed, i + 2) << 16)
                              | (get_byte(packed, i + 3) << 24) ORDER BY i), '{}')
    FROM generate_series(0, length(packed) - 4, 4) AS i
$$;

CREATE OR REPLACE FUNCTION pg_temp.float32s(packed bytea) RETURNS double precision[] LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(array_agg(
        CASE WHEN sign < 0 THEN -1 ELSE 1 END
        * CASE exponent WHEN 255 THEN 'NaN' WHEN 0 THEN fraction * 2.0::double precision ^ -149
               ELSE (8388608 + fraction) * 2.0::double precision ^ (exponent - 150) END ORDER BY i), '{}')
    FROM (SELECT i, bits AS sign, (bits >> 23) & 255 AS exponent, bits & 8388607 AS fraction
          FROM unnest(pg_temp.int32s(packed)) WITH ORDINALITY AS word (bits, i)) AS words
$$;

-- Calls in full: a row holds what its call adds to the beginning of its parent, whose answer counts as its last turn.
CREATE OR REPLACE FUNCTION pg_temp.full_calls(run text) RETURNS TABLE (id text, prompt_ids bytea, turns bigint)
LANGUAGE sql STABLE AS $$
    WITH RECURSIVE call AS (
        SELECT c.rollout_id, c.attempt, c.id, c.prompt_ids, c.sampled_ids, jsonb_array_length(c.turns)::bigint AS turns
        FROM model_calls c WHERE c.run_id = run AND c.parent_call_id IS NULL
        UNION ALL
        SELECT c.rollout_id, c.attempt, c.id,
               substr(p.prompt_ids || p.sampled_ids, 1, 4 * greatest(c.shared_tokens, 0)) || c.prompt_ids, c.sampled_ids,
               c.shared_turns + jsonb_array_length(c.turns)
        FROM call p JOIN model_calls c ON c.run_id = run AND c.parent_call_id = p.id
        WHERE c.rollout_id = p.rollout_id AND c.attempt = p.attempt)
    SELECT call.id, call.prompt_ids, call.turns FROM call
$$;

-- Completed calls whose answer the agent did not use: no later call begins with their tokens, and nobody received
-- them, or a request with the same body that came after the answer is continued; or nobody knows, and a later request
-- with the same body was delivered.
CREATE OR REPLACE FUNCTION pg_temp.unused_calls(run text) RETURNS TABLE (id text) LANGUAGE sql STABLE AS $$
    WITH call AS (
        SELECT m.id, m.request_id, m.rollout_id, m.attempt, m.sequence, m.request_sha256, f.prompt_ids,
               m.sequence + (m.total_seconds * 1e9)::bigint AS ended,
               f.prompt_ids || m.sampled_ids AS tokens, q.delivered
        FROM model_calls m JOIN pg_temp.full_calls(run) f ON f.id = m.id
        LEFT JOIN deliveries q ON q.run_id = m.run_id AND q.request_id = m.request_id
        WHERE m.run_id = run AND m.status = 'completed'
    ), candidate AS (
        SELECT c.* FROM call c
        WHERE EXISTS (SELECT FROM call n WHERE n.rollout_id = c.rollout_id AND n.attempt = c.attempt
                      AND n.request_sha256 = c.request_sha256 AND n.request_id <> c.request_id)
        OR NOT c.delivered
    ), known AS (
        SELECT c.*, EXISTS (
            SELECT FROM call n WHERE n.rollout_id = c.rollout_id AND n.attempt = c.attempt AND n.sequence > c.sequence
            AND n.delivered IS DISTINCT FROM false
            AND substring(n.prompt_ids FROM 1 FOR length(c.tokens)) = c.tokens) AS continued
        FROM candidate c
    )
    SELECT k.id FROM known k WHERE NOT k.continued AND (NOT k.delivered OR EXISTS (
        SELECT FROM known n WHERE n.rollout_id = k.rollout_id AND n.attempt = k.attempt
        AND n.request_sha256 = k.request_sha256 AND (n.continued AND n.sequence > k.ended
            OR k.delivered IS NULL AND n.delivered AND n.sequence > k.sequence)))
$$;

\echo question: rollouts that are not terminal
SELECT id, state FROM rollouts WHERE run_id = :'run' AND state = 'queued';

\echo question: groups that are open though the run is over
SELECT g.id FROM groups g JOIN run_status s ON s.run_id = g.run_id
WHERE g.run_id = :'run' AND g.state = 'open' AND s.phase IN ('completed', 'failed', 'cancelled');

\echo question: groups without all their siblings, or complete before all of them ended
SELECT g.id, g.state, g.size, count(r.id) AS siblings FROM groups g LEFT JOIN rollouts r ON r.group_id = g.id
WHERE g.run_id = :'run' GROUP BY g.id
HAVING count(r.id) <> g.size OR max(r.sibling) <> g.size - 1
    OR g.state = 'complete' AND bool_or(r.state = 'queued' OR r.finished_at > g.finished_at);

\echo question: gaps between the numbers of groups
SELECT evaluation_id, count(*), max(number) FROM groups WHERE run_id = :'run' GROUP BY evaluation_id
HAVING count(*) <> max(number) + 1;

\echo question: groups or rollouts that were cancelled while their run went on
SELECT g.id, s.phase FROM groups g JOIN run_status s ON s.run_id = g.run_id
WHERE g.run_id = :'run' AND g.state = 'cancelled' AND s.phase = 'completed'
AND coalesce(s.reason, '') NOT LIKE 'stopped early%'
UNION ALL
SELECT r.id, r.reason FROM rollouts r WHERE r.run_id = :'run' AND r.state = 'cancelled'
AND r.reason NOT IN ('the run was cancelled', 'the run failed', 'training stopped early');

\echo question: finished rollouts whose counted attempt has no outcome, or is not their last
SELECT r.id, r.attempt FROM rollouts r LEFT JOIN outcomes o ON o.rollout_id = r.id AND o.attempt = r.attempt
WHERE r.run_id = :'run' AND r.state = 'finished' AND (
    o.kind IS NULL OR r.attempt <> (SELECT max(number) FROM attempts WHERE rollout_id = r.id));

\echo question: rewards out of infrastructure failures
SELECT r.id, o.kind, r.reward FROM rollouts r JOIN outcomes o ON o.rollout_id = r.id AND o.attempt = r.attempt
WHERE r.run_id = :'run' AND r.state = 'finished' AND o.kind IN ('infra_error', 'cancelled')
UNION ALL
SELECT rollout_id, kind, reward FROM outcomes
WHERE run_id = :'run' AND kind <> 'succeeded' AND reward IS NOT NULL;

\echo question: finished rollouts whose reward or reason is not what their outcome says
SELECT r.id, r.reason, r.reward, o.kind, o.reward AS printed
FROM rollouts r JOIN outcomes o ON o.rollout_id = r.id AND o.attempt = r.attempt JOIN runs u ON u.id = r.run_id
WHERE r.run_id = :'run' AND r.state = 'finished' AND NOT coalesce(CASE
    WHEN r.reason = 'succeeded' AND u.config -> 'reward' IS NOT NULL THEN o.kind = 'succeeded'
    WHEN r.reason = 'succeeded' THEN o.kind = 'succeeded' AND r.reward = coalesce(o.reward, 0) AND (
        o.reward IS NOT NULL
        OR u.config #>> '{runner,stdout_reward}' = 'false'
        OR EXISTS (SELECT FROM rewards w WHERE w.rollout_id = r.id AND w.attempt = r.attempt)
        OR EXISTS (SELECT FROM external_rewards x WHERE x.rollout_id = r.id))
    ELSE (u.config #>> '{sampling,agent_failure}' = 'reward'
          OR (SELECT evaluation_id FROM groups WHERE id = r.group_id) IS NOT NULL)
        AND r.reward IS NOT DISTINCT FROM coalesce((u.config #>> '{sampling,failure_reward}')::double precision, r.reward)
        AND CASE r.reason WHEN 'no_reward' THEN o.kind = 'succeeded' AND o.reward IS NULL ELSE o.kind = r.reason END
    END, false);

\echo question: rewards that are not the settled total of their components
SELECT r.id, r.reward, d.total, d.reason, c.components, c.bounded FROM rollouts r
JOIN runs u ON u.id = r.run_id
LEFT JOIN gradings d ON d.rollout_id = r.id AND d.attempt = coalesce(r.attempt, r.grading_attempt)
CROSS JOIN LATERAL (
    SELECT count(*) AS components, coalesce(sum(weight * value), 0) AS weighted,
           coalesce(sum(contribution), 0) AS summed,
           coalesce(bool_or(state = 'failed' AND (weight <> 0 OR gate IS NOT NULL)), false) AS has_failed,
           greatest((u.config #>> '{reward,clip,0}')::float, least((u.config #>> '{reward,clip,1}')::float, least(
               sum(contribution), CASE WHEN bool_or(coalesce(value, 0) < gate) FILTER (WHERE state <> 'not_applicable')
               THEN 0 END))) AS bounded
    FROM rollout_rewards w
    CROSS JOIN LATERAL (SELECT (u.config -> 'reward' -> 'components' -> w.position #>> '{gate,at_least}')::float AS gate) AS g
    WHERE w.rollout_id = d.rollout_id AND w.attempt = d.attempt AND w.revision = 1) AS c
WHERE r.run_id = :'run' AND u.config -> 'reward' IS NOT NULL AND (
    r.state = 'finished' AND r.reason = 'succeeded' AND NOT coalesce(
        d.settled_at <= r.finished_at AND r.reward = d.total
        AND c.components = jsonb_array_length(u.config #> '{reward,components}')
        AND abs(d.total - coalesce(c.bounded, 0)) < 1e-9
        AND (c.has_failed AND u.config #>> '{reward,missing}' = 'renormalise'
             OR u.config #>> '{reward,total}' = 'weighted_mean' OR abs(c.summed - c.weighted) < 1e-9)
        AND NOT (c.has_failed AND u.config #>> '{reward,missing}' = 'exclude'), false)
    OR r.state = 'excluded' AND r.reason = 'ungraded' AND NOT coalesce(d.settled_at IS NOT NULL AND d.total IS NULL, false)
    OR EXISTS (SELECT FROM rewards w WHERE w.rollout_id = r.id)
    OR EXISTS (SELECT FROM external_rewards x WHERE x.rollout_id = r.id));

\echo question: credit over other rewards than the settled totals
SELECT c.group_id, c.reward_mean, earned.reward FROM group_credits c JOIN runs u ON u.id = c.run_id
CROSS JOIN LATERAL (
    SELECT avg(r.reward) AS reward FROM rollouts r
    WHERE r.group_id = c.group_id AND r.state = 'finished' AND NOT r.greedy AND r.rerolls_of IS NULL) AS earned
WHERE c.run_id = :'run' AND c.verdict = 'credited' AND u.config -> 'reward' IS NOT NULL AND u.algorithm <> 'sft'
AND abs(c.reward_mean - earned.reward) > 1e-9;

\echo question: failures without a number in the document that earned more than an attempt of their group, or less than all
WITH earned AS (
    SELECT r.id, r.group_id, g.evaluation_id, r.reason, r.reward AS own, r.reward + given AS reward,
           r.reward + greatest(given, 0) AS decided
    FROM rollouts r JOIN groups g ON g.id = r.group_id AND g.state = 'complete'
    CROSS JOIN LATERAL (SELECT coalesce(sum(value), 0) AS given FROM rewards w
                        WHERE w.rollout_id = r.id AND w.attempt = r.attempt) AS w
    WHERE r.run_id = :'run' AND r.state = 'finished')
SELECT f.id, f.reward, o.id, o.reward FROM earned f JOIN runs u ON u.id = :'run'
LEFT JOIN earned o ON o.group_id = f.group_id AND o.reason = 'succeeded' AND o.reward < f.reward - 1e-9
WHERE f.reason <> 'succeeded' AND f.evaluation_id IS NULL AND u.config #>> '{sampling,failure_reward}' IS NULL
AND NOT EXISTS (SELECT FROM external_rewards x JOIN rollouts r ON r.id = x.rollout_id WHERE r.run_id = :'run')
AND (f.own IS NULL OR f.reward > 1e-9 OR o.id IS NOT NULL
     OR f.decided < -1e-9 AND NOT EXISTS (SELECT FROM earned e WHERE e.reason = 'succeeded' AND abs(e.reward - f.decided) < 1e-9));

\echo question: failures without a number in the document with a call whose return is above that of a call of a sibling
SELECT f.call_id, f.return, o.call_id, o.return FROM credits f
JOIN rollouts r ON r.id = f.rollout_id AND r.reason <> 'succeeded' AND NOT r.greedy
JOIN runs u ON u.id = r.run_id AND u.config #>> '{sampling,failure_reward}' IS NULL
JOIN rollouts s ON s.group_id = r.group_id AND s.reason = 'succeeded' AND s.state = 'finished' AND NOT s.greedy
JOIN credits o ON o.run_id = s.run_id AND o.rollout_id = s.id AND o.return < f.return - 1e-9
WHERE f.run_id = :'run';

\echo question: agents blamed for what the platform did
SELECT r.id, r.reason, m.id, 0 AS seconds FROM rollouts r
JOIN model_calls m ON m.run_id = r.run_id AND m.rollout_id = r.id AND m.attempt = r.attempt AND m.created_at < r.finished_at
WHERE r.run_id = :'run' AND r.state = 'finished' AND r.reason IN ('agent_error', 'timeout') AND m.status = 'failed'
UNION ALL
SELECT r.id, r.reason, 'was cut off', 0 FROM rollouts r
JOIN outcomes o ON o.rollout_id = r.id AND o.attempt = r.attempt AND o.endpoint_down IS NOT NULL
JOIN runs u ON u.id = r.run_id
WHERE r.run_id = :'run' AND r.state = 'finished'
AND (r.reason = 'no_reward'
     OR r.reason = 'succeeded' AND (u.config #>> '{runner,grant_reward}')::boolean AND u.config ->> 'reward' IS NULL
     AND NOT EXISTS (SELECT FROM rewards w WHERE w.rollout_id = r.id AND w.attempt = r.attempt)
     AND NOT EXISTS (SELECT FROM external_rewards x WHERE x.rollout_id = r.id))
UNION ALL
SELECT r.id, r.reason, 'got no answer after its gateway was away', o.gateway_down_seconds FROM rollouts r
JOIN runs u ON u.id = r.run_id AND coalesce(u.config #>> '{sampling,failed_call}', '') <> 'accept'
JOIN attempts a ON a.rollout_id = r.id AND a.number = r.attempt
JOIN outcomes o ON o.rollout_id = r.id AND o.attempt = r.attempt AND o.gateway_down_seconds IS NOT NULL
CROSS JOIN LATERAL (SELECT extract(epoch FROM a.finished_at) - o.gateway_down_seconds AS at) AS down
WHERE r.run_id = :'run' AND r.state = 'finished' AND r.reason = 'succeeded'
AND NOT EXISTS (SELECT FROM model_calls m WHERE m.run_id = r.run_id AND m.rollout_id = r.id AND m.attempt = r.attempt
                AND m.status IN ('completed', 'refused') AND m.sequence / 1e9 + m.total_seconds >= down.at)
AND NOT EXISTS (SELECT FROM deliveries q WHERE q.run_id = r.run_id AND q.rollout_id = r.id AND q.attempt = r.attempt
                AND q.delivered AND q.sequence / 1e9 + q.seconds >= down.at)
UNION ALL
SELECT r.id, r.reason, 'had no call', q.waited_seconds FROM rollouts r
JOIN deliveries q ON q.run_id = r.run_id AND q.rollout_id = r.id AND q.attempt = r.attempt AND q.created_at < r.finished_at
WHERE r.run_id = :'run' AND r.state = 'finished' AND r.reason IN ('agent_error', 'timeout') AND NOT q.delivered
AND NOT EXISTS (SELECT FROM model_calls m WHERE m.run_id = q.run_id AND m.id = q.request_id)
UNION ALL
SELECT r.id, r.reason, 'waited', w.seconds FROM rollouts r
JOIN attempts a ON a.rollout_id = r.id AND a.number = r.attempt
CROSS JOIN LATERAL (
    SELECT sum(upper(wait) - lower(wait)) / 1e9 AS seconds FROM unnest((
        SELECT range_agg(int8range(q.sequence, q.sequence + (q.waited_seconds * 1e9)::bigint))
               - range_agg(int8range(q.sequence + (least(q.waited_seconds, q.seconds) * 1e9)::bigint,
                                     q.sequence + (q.seconds * 1e9)::bigint)) FROM deliveries q
        WHERE q.run_id = r.run_id AND q.rollout_id = r.id AND q.attempt = r.attempt)) AS wait) w
WHERE r.run_id = :'run' AND r.state = 'finished' AND r.reason IN ('agent_error', 'timeout', 'no_reward')
AND w.seconds > 0.2 * extract(epoch FROM a.finished_at - a.started_at)
UNION ALL
SELECT r.id, r.reason, 'had no answer', q.waited_seconds FROM rollouts r
JOIN runs u ON u.id = r.run_id
JOIN deliveries q ON q.run_id = r.run_id AND q.rollout_id = r.id AND q.attempt = r.attempt
WHERE r.run_id = :'run' AND r.state = 'finished' AND NOT q.delivered AND q.waited_seconds > 1
AND r.reason <> 'timeout'
AND (r.reason <> 'succeeded' OR u.config #>> '{sampling,failed_call}' IS DISTINCT FROM 'accept')
AND NOT EXISTS (
    SELECT FROM deliveries n WHERE n.run_id = r.run_id AND n.rollout_id = r.id AND n.attempt = r.attempt
    AND n.delivered AND n.sequence + (n.seconds * 1e9)::bigint > q.sequence);

\echo question: requests whose end their gateway never wrote, though it lived on
SELECT q.request_id, q.rollout_id, a.finished_at, g.seen_at FROM deliveries q
JOIN attempts a ON a.rollout_id = q.rollout_id AND a.number = q.attempt JOIN gateways g ON g.name = q.gateway
WHERE q.run_id = :'run' AND q.seconds IS NULL AND g.seen_at > a.finished_at + interval '60 seconds';

\echo question: answers with credit that nobody received
SELECT c.call_id, c.rollout_id FROM credits c JOIN model_calls m ON m.run_id = c.run_id AND m.id = c.call_id
JOIN deliveries q ON q.run_id = m.run_id AND q.request_id = m.request_id
WHERE c.run_id = :'run' AND NOT q.delivered
AND NOT EXISTS (SELECT FROM credits n WHERE n.run_id = c.run_id AND n.parent_call_id = c.call_id);

\echo question: answers with credit whose agent discarded them and asked again
SELECT c.call_id, c.rollout_id, n.id FROM credits c JOIN model_calls m ON m.run_id = c.run_id AND m.id = c.call_id
JOIN model_calls n ON n.run_id = m.run_id AND n.rollout_id = m.rollout_id AND n.attempt = m.attempt
    AND n.request_sha256 = m.request_sha256 AND n.sequence > m.sequence + (m.total_seconds * 1e9)::bigint
WHERE c.run_id = :'run' AND EXISTS (SELECT FROM credits x WHERE x.run_id = n.run_id AND x.parent_call_id = n.id)
AND NOT EXISTS (SELECT FROM credits x WHERE x.run_id = c.run_id AND x.parent_call_id = c.call_id);

\echo question: answers with credit of unknown delivery whose request was answered again
SELECT c.call_id, c.rollout_id, n.id FROM credits c JOIN model_calls m ON m.run_id = c.run_id AND m.id = c.call_id
LEFT JOIN deliveries q ON q.run_id = m.run_id AND q.request_id = m.request_id
JOIN model_calls n ON n.run_id = m.run_id AND n.rollout_id = m.rollout_id AND n.attempt = m.attempt
    AND n.request_sha256 = m.request_sha256 AND n.sequence > m.sequence
JOIN deliveries d ON d.run_id = n.run_id AND d.request_id = n.request_id AND d.delivered
WHERE c.run_id = :'run' AND q.delivered IS NULL
AND NOT EXISTS (SELECT FROM credits x WHERE x.run_id = c.run_id AND x.parent_call_id = c.call_id);

\echo question: outcomes that their exit code or their duration belies
SELECT o.rollout_id, o.attempt, o.kind, o.exit_code, o.detail FROM outcomes o
JOIN attempts a ON a.rollout_id = o.rollout_id AND a.number = o.attempt JOIN runs u ON u.id = o.run_id
JOIN rollouts r ON r.id = o.rollout_id JOIN groups g ON g.id = r.group_id
CROSS JOIN LATERAL (SELECT coalesce(g.runner_type, u.runner_type) AS type, coalesce(
    jsonb_path_query_first(u.config, '$.agents[*] ? (@.name == $name).runner', jsonb_build_object('name', g.agent)),
    u.config -> 'runner') AS document) AS runner
WHERE o.run_id = :'run' AND CASE o.kind
    -- An external agent is no process of the platform's.
    WHEN 'succeeded' THEN o.exit_code IS DISTINCT FROM CASE runner.type WHEN 'external' THEN NULL ELSE 0 END
    WHEN 'agent_error' THEN o.exit_code = 0 AND coalesce(o.detail, '') NOT LIKE '%reward%'
    WHEN 'timeout' THEN extract(epoch FROM a.finished_at - a.created_at)
        < coalesce((runner.document ->> 'timeout_seconds')::double precision, 300)
    ELSE o.reward IS NOT NULL END;

\echo question: excluded rollouts that had tries left, or whose attempts do not show the cause
SELECT r.id, r.reason, t.tries, t.last FROM rollouts r JOIN runs u ON u.id = r.run_id
CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE o.kind IS DISTINCT FROM 'cancelled') AS tries,
           (array_agg(coalesce(o.kind, a.state) ORDER BY a.number DESC))[1] AS last
    FROM attempts a LEFT JOIN outcomes o ON o.rollout_id = a.rollout_id AND o.attempt = a.number
    WHERE a.rollout_id = r.id) t
WHERE r.run_id = :'run' AND r.state = 'excluded' AND NOT coalesce(CASE
    WHEN r.reason IN ('lease_lost', 'infra_error', 'cancelled', 'call_failed', 'held')
    THEN t.tries >= (u.config #>> '{sampling,max_attempts}')::integer AND CASE r.reason
        WHEN 'lease_lost' THEN t.last = 'expired' WHEN 'call_failed' THEN t.last IN ('agent_error', 'timeout', 'succeeded')
        WHEN 'held' THEN t.last IN ('agent_error', 'timeout', 'succeeded') ELSE t.last = r.reason END
    WHEN r.reason = 'ungraded' THEN t.last = 'succeeded' AND EXISTS (SELECT FROM gradings WHERE rollout_id = r.id AND reason IS NOT NULL)
    ELSE u.config #>> '{sampling,agent_failure}' = 'exclude'
        AND (SELECT evaluation_id FROM groups WHERE id = r.group_id) IS NULL
        AND CASE r.reason WHEN 'no_reward' THEN t.last = 'succeeded' ELSE t.last = r.reason END
    END, false);

\echo question: two attempts of one rollout that settled with a verdict, beside failures of the platform
SELECT o.rollout_id, count(*) FROM outcomes o JOIN rollouts r ON r.id = o.rollout_id
WHERE o.run_id = :'run' AND o.kind NOT IN ('infra_error', 'cancelled') AND o.attempt > r.excused_attempt
GROUP BY o.rollout_id HAVING count(*) > 1;

\echo question: attempts excused though the platform failed nothing
SELECT o.rollout_id, o.attempt, o.kind FROM outcomes o JOIN rollouts r ON r.id = o.rollout_id
WHERE o.run_id = :'run' AND o.kind NOT IN ('infra_error', 'cancelled') AND o.attempt <= r.excused_attempt
AND o.endpoint_down IS NULL AND o.gateway_down_seconds IS NULL
AND NOT EXISTS (SELECT FROM model_calls m WHERE m.run_id = o.run_id AND m.rollout_id = o.rollout_id
                AND m.attempt = o.attempt AND (m.status = 'failed' OR m.queued_seconds > 1))
AND NOT EXISTS (SELECT FROM deliveries q WHERE q.run_id = o.run_id AND q.rollout_id = o.rollout_id
                AND q.attempt = o.attempt AND NOT q.delivered
                AND NOT EXISTS (SELECT FROM model_calls m WHERE m.run_id = q.run_id AND m.id = q.request_id))
AND coalesce((SELECT coalesce(sum(q.waited_seconds), 0) + count(*) FILTER (WHERE q.seconds IS NULL)
              FROM deliveries q WHERE q.run_id = o.run_id AND q.rollout_id = o.rollout_id AND q.attempt = o.attempt), 0)
    < least(1, (SELECT 0.2 * extract(epoch FROM a.finished_at - a.started_at) FROM attempts a
                WHERE a.rollout_id = o.rollout_id AND a.number = o.attempt));

\echo question: attempts that expired before their lease was over
SELECT rollout_id, number, lease_expires_at, finished_at FROM attempts
WHERE run_id = :'run' AND state = 'expired' AND finished_at < lease_expires_at;

\echo question: settled attempts without an outcome, and outcomes of attempts that were not settled
SELECT coalesce(a.rollout_id, o.rollout_id), coalesce(a.number, o.attempt), a.state, o.kind
FROM (SELECT * FROM attempts WHERE run_id = :'run') a
FULL JOIN (SELECT * FROM outcomes WHERE run_id = :'run') o ON o.rollout_id = a.rollout_id AND o.attempt = a.number
WHERE (coalesce(a.state, '') = 'settled') <> (o.kind IS NOT NULL);

\echo question: live attempts of rollouts that ended
SELECT a.rollout_id, a.number, a.state FROM attempts a JOIN rollouts r ON r.id = a.rollout_id
WHERE a.run_id = :'run' AND a.state IN ('leased', 'running') AND r.state IN ('finished', 'excluded');

\echo question: gaps between attempts, or attempts that ran at the same time
SELECT rollout_id, number FROM (
    SELECT rollout_id, number, started_at, row_number() OVER siblings AS place,
           lag(finished_at, 1, '-infinity') OVER siblings AS before
    FROM attempts WHERE run_id = :'run' WINDOW siblings AS (PARTITION BY rollout_id ORDER BY number)) a
WHERE number <> place OR before IS NULL OR started_at < before;

\echo question: calls recorded twice, or with choices missing
SELECT min(id), request_id, count(*) FROM model_calls WHERE run_id = :'run' GROUP BY request_id
HAVING count(*) <> count(DISTINCT id) OR count(*) <> count(DISTINCT choice) OR count(*) <> max(choice) + 1
    OR count(DISTINCT (rollout_id, attempt)) > 1;

\echo question: calls of attempts that never were
SELECT c.id, c.rollout_id, c.attempt FROM model_calls c
LEFT JOIN attempts a ON a.rollout_id = c.rollout_id AND a.number = c.attempt
WHERE c.run_id = :'run' AND a.number IS NULL;

\echo question: calls whose parent is none of their attempt
SELECT id, parent_call_id FROM model_calls WHERE run_id = :'run'
AND id NOT IN (SELECT f.id FROM pg_temp.full_calls(:'run') f);

\echo question: calls that share more of their parent than it has
SELECT c.id, c.parent_call_id, c.shared_turns, c.shared_tokens FROM model_calls c
LEFT JOIN model_calls p ON p.run_id = c.run_id AND p.id = c.parent_call_id
LEFT JOIN pg_temp.full_calls(:'run') f ON f.id = p.id
WHERE c.run_id = :'run' AND (
    c.shared_turns NOT BETWEEN 0 AND coalesce(f.turns + (p.answer IS NOT NULL)::int, 0)
    OR c.shared_tokens NOT BETWEEN 0 AND coalesce((length(f.prompt_ids) + length(p.sampled_ids)) / 4, 0));

\echo question: calls whose columns contradict each other
SELECT id, status FROM model_calls JOIN pg_temp.full_calls(:'run') f USING (id) WHERE run_id = :'run' AND (
    length(f.prompt_ids) <> 4 * prompt_tokens OR length(sampled_ids) <> 4 * completion_tokens
    OR length(generator_logprobs) <> 4 * completion_tokens OR length(policy_versions) <> 4 * completion_tokens
    OR cached_tokens > prompt_tokens
    OR (min_policy_version IS NULL) <> (completion_tokens = 0)
    OR parent_call_id IS NULL AND tools IS NULL OR answer ->> 'role' <> 'assistant'
    OR status = 'completed' AND (answer IS NULL OR finish_reason IS NULL OR prompt_tokens = 0)
    OR status <> 'completed' AND (answer IS NOT NULL OR trainable)
    OR status = 'refused' AND completion_tokens > 0
    OR finish_reason = 'context_length_exceeded' AND status <> 'refused');

\echo question: sampled tokens with an impossible probability
SELECT c.id, p FROM model_calls c CROSS JOIN unnest(pg_temp.float32s(c.generator_logprobs)) AS p
WHERE c.run_id = :'run' AND NOT (p > '-Infinity' AND p <= 1e-3);

\echo question: tokens of policy versions that did not exist when they were sampled
SELECT c.id, t.version FROM model_calls c
CROSS JOIN LATERAL (SELECT DISTINCT v AS version FROM unnest(pg_temp.int32s(c.policy_versions)) AS v) t
LEFT JOIN policies u ON u.run_id = c.run_id AND u.name = (
    SELECT named ->> 'policy' FROM runs l CROSS JOIN jsonb_array_elements(l.config -> 'roles') AS named
    WHERE l.id = c.run_id AND named ->> 'name' = c.role)
LEFT JOIN policy_versions p
    ON p.run_id = coalesce(u.id, c.run_id) AND p.version = t.version AND p.created_at <= c.created_at
WHERE c.run_id = :'run' AND p.version IS NULL;

\echo question: calls whose oldest and newest version are not those of their tokens
SELECT c.id FROM model_calls c
CROSS JOIN LATERAL (SELECT min(v) AS oldest, max(v) AS newest FROM unnest(pg_temp.int32s(c.policy_versions)) AS v) t
WHERE c.run_id = :'run'
AND (t.oldest, t.newest) IS DISTINCT FROM (c.min_policy_version, c.max_policy_version);

\echo question: evaluations measured on another version than theirs
SELECT c.id, c.min_policy_version, c.max_policy_version FROM model_calls c
JOIN rollouts r ON r.id = c.rollout_id AND r.attempt = c.attempt
JOIN groups g ON g.id = r.group_id JOIN evaluations e ON e.id = g.evaluation_id
WHERE c.run_id = :'run' AND c.status = 'completed' AND c.completion_tokens > 0
AND NOT EXISTS (
    SELECT FROM runs u CROSS JOIN jsonb_array_elements(u.config -> 'roles') AS named
    WHERE u.id = c.run_id AND named ->> 'name' = c.role AND named ->> 'policy' IS NOT NULL)
AND (c.min_policy_version <> g.admitted_version OR c.max_policy_version <> g.admitted_version
     OR g.admitted_version <> coalesce(e.policy_version, g.admitted_version));

\echo question: complete training groups without a verdict of credit
SELECT g.id FROM groups g JOIN run_status s ON s.run_id = g.run_id LEFT JOIN group_credits c ON c.group_id = g.id AND c.run_id = g.run_id
WHERE g.run_id = :'run' AND g.evaluation_id IS NULL AND g.state = 'complete' AND c.verdict IS NULL
AND s.phase NOT IN ('failed', 'cancelled') AND coalesce(s.reason, '') NOT LIKE 'stopped early%';

\echo question: groups excluded without a cause, or for one that their siblings belie
SELECT c.group_id, c.verdict, c.reason, c.counted_siblings, r.finished FROM group_credits c
JOIN runs u ON u.id = c.run_id
CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE state = 'finished') AS finished FROM rollouts WHERE group_id = c.group_id) r
WHERE c.run_id = :'run' AND u.algorithm <> 'sft' AND (
    c.verdict = 'excluded' AND c.reason IS NULL
    OR c.counted_siblings <> r.finished
    OR (c.verdict = 'excluded') <> (c.counted_siblings < (u.config #>> '{sampling,min_siblings}')::integer));

\echo question: credited groups of a completed run that no step judged
SELECT c.group_id FROM group_credits c JOIN run_status s ON s.run_id = c.run_id
LEFT JOIN step_groups t ON t.group_id = c.group_id AND t.run_id = c.run_id
WHERE c.run_id = :'run' AND c.verdict = 'credited' AND s.phase = 'completed' AND t.group_id IS NULL
AND NOT EXISTS (SELECT FROM runs WHERE id = c.run_id AND algorithm = 'sft')
AND coalesce(s.reason, '') NOT LIKE 'stopped early%';

\echo question: groups whose variance is not that of their advantages
SELECT c.group_id, c.has_variance FROM group_credits c
WHERE c.run_id = :'run' AND c.has_variance <> EXISTS (
    SELECT FROM samples s CROSS JOIN unnest(pg_temp.float32s(s.advantages)) AS advantage
    WHERE s.run_id = c.run_id AND s.group_id = c.group_id AND advantage <> 0);

\echo question: samples of groups that were not credited, or of attempts that do not count
SELECT s.id FROM samples s LEFT JOIN group_credits c ON c.group_id = s.group_id AND c.run_id = s.run_id AND c.verdict = 'credited'
LEFT JOIN rollouts r ON r.id = s.rollout_id AND r.group_id = s.group_id AND r.state = 'finished'
WHERE s.run_id = :'run' AND (c.group_id IS NULL OR r.id IS NULL);

\echo question: samples whose columns contradict each other
SELECT id FROM samples WHERE run_id = :'run' AND (
    length(token_ids) <> 4 * length OR length(mask) <> length OR length(generator_logprobs) <> 4 * length
    OR length(advantages) <> 4 * length OR length(temperatures) <> 4 * length OR length(policy_versions) <> 4 * length
    OR bit_count(mask) <> trained_tokens);

\echo question: sampled tokens that no sample trains, or more than one, or with other numbers than were sampled
WITH learnable AS (
    SELECT c.rollout_id, w.prompt_ids, c.sampled_ids, c.generator_logprobs, c.policy_versions, c.prompt_tokens,
           c.completion_tokens, min(c.id) AS id, count(*) AS calls
    FROM model_calls c JOIN pg_temp.full_calls(:'run') w ON w.id = c.id JOIN rollouts r ON r.id = c.rollout_id AND r.attempt = c.attempt AND r.state = 'finished'
    JOIN group_credits g ON g.group_id = r.group_id AND g.run_id = r.run_id AND g.verdict = 'credited'
    WHERE c.run_id = :'run' AND c.status = 'completed' AND c.trainable AND c.temperature > 0
    AND c.prompt_tokens > 0 AND c.completion_tokens > 0 AND c.id NOT IN (SELECT u.id FROM pg_temp.unused_calls(:'run') u)
    GROUP BY 1, 2, 3, 4, 5, 6, 7)
SELECT l.id, l.calls, count(s.id) AS samples FROM learnable l
LEFT JOIN samples s ON s.run_id IN (SELECT id FROM policies WHERE :'run' IN (id, run_id)) AND s.rollout_id = l.rollout_id
    AND substring(s.token_ids FROM 1 FOR 4 * (l.prompt_tokens + l.completion_tokens)) = l.prompt_ids || l.sampled_ids
    AND substring(s.generator_logprobs FROM 1 + 4 * l.prompt_tokens FOR 4 * l.completion_tokens) = l.generator_logprobs
    AND substring(s.policy_versions FROM 1 + 4 * l.prompt_tokens FOR 4 * l.completion_tokens) = l.policy_versions
    AND bit_count(substring(s.mask FROM 1 + l.prompt_tokens FOR l.completion_tokens)) = l.completion_tokens
GROUP BY l.id, l.calls HAVING l.calls <> count(s.id);

\echo question: samples that train more or fewer tokens than were sampled
SELECT r.id, c.tokens AS sampled, s.tokens AS trained FROM rollouts r
JOIN group_credits g ON g.group_id = r.group_id AND g.run_id = r.run_id AND g.verdict = 'credited'
CROSS JOIN LATERAL (
    SELECT coalesce(sum(completion_tokens), 0) AS tokens FROM model_calls m
    WHERE m.run_id = r.run_id AND m.rollout_id = r.id AND m.attempt = r.attempt AND m.status = 'completed'
    AND m.trainable AND m.temperature > 0 AND m.prompt_tokens > 0
    AND m.id NOT IN (SELECT u.id FROM pg_temp.unused_calls(:'run') u)) c
LEFT JOIN (
    SELECT rollout_id, sum(trained_tokens) AS tokens FROM samples
    WHERE run_id IN (SELECT id FROM policies WHERE :'run' IN (id, run_id)) GROUP BY rollout_id
) s ON s.rollout_id = r.id
WHERE r.run_id = :'run' AND r.state = 'finished' AND c.tokens <> coalesce(s.tokens, 0);

\echo question: samples older or younger than they say
SELECT s.id, s.min_policy_version FROM samples s
WHERE s.run_id = :'run' AND s.min_policy_version IS DISTINCT FROM (
    -- No version of the run sampled demonstrations.
    SELECT coalesce(min(v), -1) FROM unnest(pg_temp.int32s(s.policy_versions)) AS v WHERE v >= 0);

\echo question: demonstrations that earned too little, or of runs or tasks that their run does not name
SELECT s.id, o.run_id, earned.reward FROM samples s JOIN runs u ON u.id = s.run_id AND u.algorithm = 'sft'
JOIN rollouts o ON o.id = s.rollout_id JOIN groups g ON g.id = o.group_id
CROSS JOIN LATERAL (
    SELECT o.reward + coalesce((SELECT sum(value) FROM rewards w WHERE w.rollout_id = o.id AND w.attempt = o.attempt), 0)
        + coalesce((SELECT sum(value) FROM external_rewards x
                    WHERE x.rollout_id = o.id AND coalesce(x.attempt, o.attempt) = o.attempt), 0) AS reward) AS earned
WHERE s.run_id = :'run' AND NOT (
    u.config #> '{algorithm,runs}' ? o.run_id AND g.dataset_id = u.dataset_id AND g.state = 'complete'
    AND earned.reward >= (u.config #>> '{algorithm,min_reward}')::double precision);

\echo question: passes over demonstrations that used a group twice before all others once
WITH uses AS (
    SELECT c.group_id, (SELECT count(*) FROM step_groups t WHERE t.group_id = c.group_id AND t.run_id = c.run_id)
        + (SELECT count(*) FROM step_replays n WHERE n.group_id = c.group_id AND n.run_id = c.run_id) AS count
    FROM group_credits c JOIN runs u ON u.id = c.run_id AND u.algorithm = 'sft'
    WHERE c.run_id = :'run' AND c.verdict = 'credited' AND c.has_variance)
SELECT max(count), min(count) FROM uses HAVING max(count) - min(count) > 1;

\echo question: advantages that samples have other than the settled total less the mean of its group
WITH compared AS (
    SELECT r.id, r.group_id, r.reward - avg(r.reward) OVER (PARTITION BY r.group_id) AS advantage
    FROM rollouts r JOIN group_credits c ON c.group_id = r.group_id AND c.run_id = r.run_id AND c.verdict = 'credited'
    JOIN runs u ON u.id = r.run_id
    WHERE r.run_id = :'run' AND r.state = 'finished' AND NOT r.greedy AND u.algorithm <> 'sft'
    -- Elsewhere an advantage is more than one subtraction of what every call of a rollout has.
    AND u.config -> 'reward' IS NOT NULL AND coalesce(u.config #>> '{credit,rule,type}', 'discounted') IN ('discounted', 'identical')
    AND coalesce((u.config #>> '{credit,rule,gamma}')::float, 1) = 1
    AND coalesce(u.config #>> '{credit,baseline,type}', 'mean') = 'mean'
    AND coalesce(u.config #>> '{credit,baseline,per}', 'rollout') = 'rollout'
    AND coalesce((u.config #>> '{credit,baseline,min_spread}')::float, 0) = 0
    AND coalesce(u.config #> '{credit,air}', 'null') = 'null' AND coalesce(u.config #> '{credit,shaping}', 'null') = 'null'
    AND NOT EXISTS (SELECT FROM rewards w WHERE w.run_id = r.run_id))
SELECT s.id, r.advantage, t.advantage FROM compared r
JOIN samples s ON s.run_id = :'run' AND s.rollout_id = r.id
CROSS JOIN LATERAL unnest(pg_temp.float32s(s.advantages)) WITH ORDINALITY AS t (advantage, place)
WHERE get_byte(s.mask, t.place::integer - 1) = 1 AND abs(t.advantage - r.advantage) > 1e-6 * greatest(1, abs(r.advantage));

\echo question: samples in two steps
SELECT sample_id, count(*) FROM step_samples WHERE run_id = :'run' GROUP BY sample_id HAVING count(*) > 1;

\echo question: steps without samples or groups
SELECT s.number FROM steps s WHERE s.run_id = :'run' AND (
    NOT EXISTS (SELECT FROM step_groups g WHERE g.run_id = s.run_id AND g.step = s.number)
    AND NOT EXISTS (SELECT FROM step_replays g JOIN runs u ON u.id = g.run_id AND u.algorithm = 'sft'
                    WHERE g.run_id = s.run_id AND g.step = s.number)
    OR EXISTS (SELECT FROM step_groups g WHERE g.run_id = s.run_id AND g.step = s.number AND g.verdict = 'trained')
    AND NOT EXISTS (SELECT FROM step_samples t WHERE t.run_id = s.run_id AND t.step = s.number));

\echo question: steps of more or fewer groups than the run asks for
SELECT s.number, count(g.group_id) FROM steps s JOIN runs u ON u.id = s.run_id
LEFT JOIN step_groups g ON g.run_id = s.run_id AND g.step = s.number WHERE s.run_id = :'run' AND u.algorithm <> 'sft'
GROUP BY s.number, u.config HAVING count(g.group_id) - least(
    count(g.group_id) FILTER (WHERE g.verdict = 'no_variance'),
    coalesce((u.config #>> '{sampling,refill_zero_variance}')::integer, 0)
    * (u.config #>> '{sampling,groups_per_step}')::integer) <> (u.config #>> '{sampling,groups_per_step}')::integer;

\echo question: samples that a step trained though it names no such group, or missed though it does
SELECT coalesce(seen.sample_id, due.id) AS sample, seen.step AS trained_in, due.step AS due_in
FROM (SELECT * FROM step_samples WHERE run_id = :'run') seen
FULL JOIN (
    SELECT s.id, g.step FROM step_groups g JOIN samples s ON s.run_id = g.run_id AND s.group_id = g.group_id
    WHERE g.run_id = :'run' AND g.verdict = 'trained'
) due ON due.id = seen.sample_id AND due.step = seen.step
WHERE seen.sample_id IS NULL OR due.id IS NULL;

\echo question: groups whose verdict of the trainer contradicts their credit
SELECT t.group_id, t.verdict, t.step, c.verdict, c.has_variance FROM step_groups t
LEFT JOIN group_credits c ON c.group_id = t.group_id AND c.run_id = t.run_id
CROSS JOIN LATERAL (
    -- These also train tokens without an advantage.
    SELECT coalesce((u.config #>> '{credit,baseline,whiten}')::boolean, false)
        OR coalesce(u.config #> '{algorithm,critic}', 'null') <> 'null'
        OR coalesce(u.config #> '{algorithm,distillation}', 'null') <> 'null'
        OR coalesce((u.config #>> '{algorithm,kl_coefficient}')::double precision, 0) > 0
        OR coalesce((u.config #>> '{algorithm,entropy_coefficient}')::double precision, 0) > 0 AS every_group
    FROM runs u WHERE u.id = t.run_id
) has
WHERE t.run_id = :'run' AND NOT coalesce(c.verdict = 'credited' AND CASE t.verdict
    WHEN 'trained' THEN (c.has_variance OR has.every_group) AND c.min_policy_version IS NOT NULL AND t.step IS NOT NULL
    WHEN 'no_variance' THEN NOT c.has_variance AND c.min_policy_version IS NOT NULL AND t.step IS NOT NULL
    WHEN 'untrainable' THEN c.min_policy_version IS NULL AND t.step IS NOT NULL
    ELSE t.step IS NULL END, false);

\echo question: steps with a teacher that did not measure the distance to it, or without one that did
SELECT s.number FROM steps s JOIN runs u ON u.id = s.run_id
WHERE s.run_id = :'run' AND s.metrics ? 'kl_teacher'
    <> (coalesce(u.config #> '{algorithm,distillation}', 'null') <> 'null');

\echo question: numbers of a step that are missing, not finite, or not those of its samples
SELECT s.number, s.metrics, t.samples, t.tokens, t.rollouts FROM steps s
CROSS JOIN LATERAL (
    SELECT count(*) AS samples, coalesce(sum(p.trained_tokens), 0) AS tokens, count(DISTINCT p.rollout_id) AS rollouts
    FROM samples p
    WHERE p.run_id = s.run_id AND (
        p.id IN (SELECT sample_id FROM step_samples n WHERE n.run_id = s.run_id AND n.step = s.number)
        OR p.group_id IN (SELECT group_id FROM step_replays n WHERE n.run_id = s.run_id AND n.step = s.number))) t
WHERE s.run_id = :'run' AND (
    NOT s.metrics ?& ARRAY['loss', 'samples', 'trained_tokens', 'rollouts']
    OR s.metrics ? 'gradient_norm' <> ((s.metrics ->> 'computed_tokens')::numeric > 0)
    OR EXISTS (SELECT FROM jsonb_each(s.metrics) AS m WHERE jsonb_typeof(m.value) <> 'number')
    OR ((s.metrics ->> 'samples')::numeric, (s.metrics ->> 'trained_tokens')::numeric, (s.metrics ->> 'rollouts')::numeric)
        IS DISTINCT FROM (t.samples::numeric, t.tokens::numeric, t.rollouts::numeric));

\echo question: steps without their policy version, or versions without their step
SELECT coalesce(s.number, v.version) FROM (SELECT number FROM steps WHERE run_id = :'run') s
FULL JOIN (SELECT version FROM policy_versions WHERE run_id = :'run' AND version > 0) v ON v.version = s.number
WHERE s.number IS NULL OR v.version IS NULL;

\echo question: gaps between versions
SELECT count(*), max(version) FROM policy_versions WHERE run_id = :'run' HAVING count(*) <> max(version) + 1;

\echo question: steps or versions out of order
SELECT number FROM (
    SELECT s.number, s.created_at, lag(s.created_at) OVER (ORDER BY s.number) AS before, v.created_at AS exported_at
    FROM steps s JOIN policy_versions v ON v.run_id = s.run_id AND v.version = s.number WHERE s.run_id = :'run') o
WHERE created_at < before OR exported_at <> created_at;

\echo question: completed runs with other steps than were asked for
SELECT s.phase, count(t.number) FROM run_status s JOIN runs u ON u.id = s.run_id
LEFT JOIN steps t ON t.run_id = s.run_id WHERE s.run_id = :'run' AND s.phase = 'completed'
AND coalesce(s.reason, '') NOT LIKE 'stopped early%'
GROUP BY s.phase, u.config HAVING count(t.number) <> (u.config #>> '{training,steps}')::integer;

\echo question: completed runs whose last steps had no token that can be trained
SELECT s.run_id, count(*) FROM run_status s JOIN runs u ON u.id = s.run_id
CROSS JOIN LATERAL (SELECT number FROM steps WHERE run_id = s.run_id ORDER BY number DESC LIMIT 2) n
WHERE s.run_id = :'run' AND s.phase = 'completed'
GROUP BY s.run_id, u.config HAVING count(*) >= least(2, (u.config #>> '{training,steps}')::integer) AND bool_and(
    NOT EXISTS (SELECT FROM step_groups g WHERE g.run_id = s.run_id AND g.step = n.number AND g.verdict <> 'untrainable')
    AND NOT EXISTS (SELECT FROM step_replays g WHERE g.run_id = s.run_id AND g.step = n.number));

\echo question: groups whose calls were counted otherwise than they are stored
SELECT c.group_id, c.calls, m.calls, m.untrainable, m.overflows FROM group_credits c
CROSS JOIN LATERAL (
    SELECT count(*) AS calls, count(*) FILTER (WHERE m.status <> 'completed' OR NOT m.trainable) AS untrainable,
           count(*) FILTER (WHERE m.finish_reason = 'context_length_exceeded') AS overflows
    FROM rollouts r JOIN model_calls m ON m.run_id = r.run_id AND m.rollout_id = r.id AND m.attempt = r.attempt
    WHERE r.group_id = c.group_id AND r.state = 'finished' AND NOT r.greedy) m
WHERE c.run_id = :'run' AND c.calls IS NOT NULL AND NOT EXISTS (SELECT FROM runs WHERE id = c.run_id AND algorithm = 'sft')
AND NOT EXISTS (SELECT FROM policies WHERE name <> '' AND c.run_id IN (id, run_id))
AND ((c.calls ->> 'calls')::bigint <> m.calls OR (c.calls ->> 'overflows')::bigint <> m.overflows
     OR (SELECT coalesce(sum(value::bigint), 0) FROM jsonb_each_text(c.calls -> 'untrainable')) < m.untrainable);

\echo question: tokens older than the lag allows
SELECT t.sample_id, t.step, s.min_policy_version FROM step_samples t
JOIN samples s ON s.run_id = t.run_id AND s.id = t.sample_id JOIN runs r ON r.id = t.run_id
WHERE t.run_id = :'run'
AND r.algorithm <> 'sft' AND t.step - 1 - s.min_policy_version > (r.config #>> '{sampling,max_policy_lag}')::integer;

\echo question: groups used again that no earlier step trained, that are too old, or too often
SELECT n.group_id, n.use, n.step FROM step_replays n JOIN runs r ON r.id = n.run_id
LEFT JOIN step_groups t ON t.group_id = n.group_id AND t.run_id = n.run_id
LEFT JOIN group_credits c ON c.group_id = n.group_id AND c.run_id = n.run_id
WHERE n.run_id = :'run' AND NOT coalesce(
    t.verdict = 'trained' AND t.step < n.step
    AND (r.algorithm = 'sft' OR n.use <= (r.config #>> '{sampling,replay,uses}')::integer
         AND n.step - 1 - c.min_policy_version <= (r.config #>> '{sampling,max_policy_lag}')::integer)
    AND EXISTS (SELECT FROM steps s WHERE s.run_id = n.run_id AND s.number = n.step)
    AND n.use = (SELECT count(*) FROM step_replays b WHERE b.group_id = n.group_id AND b.run_id = n.run_id AND b.step <= n.step), false);

\echo question: groups refused as stale that were not
SELECT t.group_id, c.min_policy_version FROM step_groups t JOIN group_credits c ON c.group_id = t.group_id AND c.run_id = t.run_id
JOIN runs r ON r.id = t.run_id
CROSS JOIN LATERAL (
    SELECT count(*) AS done FROM steps s WHERE s.run_id = t.run_id AND s.created_at <= t.created_at) n
WHERE t.run_id = :'run' AND t.verdict = 'stale'
AND NOT coalesce(n.done - c.min_policy_version > (r.config #>> '{sampling,max_policy_lag}')::integer, false);

\echo question: groups that replace one that was not lost, or sample another task than it
SELECT g.id, g.replaces FROM groups g LEFT JOIN groups l ON l.id = g.replaces AND l.run_id = g.run_id
WHERE g.run_id = :'run' AND g.replaces IS NOT NULL AND NOT coalesce(
    l.replaces IS NULL AND l.evaluation_id IS NULL AND l.task_number = g.task_number AND l.number < g.number
    AND (EXISTS (SELECT FROM group_credits c WHERE c.group_id = l.id AND c.run_id = l.run_id AND c.verdict = 'excluded')
         OR EXISTS (SELECT FROM step_groups s WHERE s.group_id = l.id AND s.run_id = l.run_id AND s.verdict = 'stale')), false);

\echo question: steps that compared no token with the engine and judge how far both are apart
SELECT number, metrics ->> 'logprob_gap_sample_share' FROM steps
WHERE run_id = :'run' AND (metrics ->> 'logprob_gap_tokens')::float = 0
AND metrics ?| array['logprob_gap_sample_share', 'logprob_gap_mean'];

\echo question: trainers that started again after a verdict, or a second want of memory without a step
SELECT e.attempt, e.state, e.step FROM trainer_ends e
WHERE e.run_id = :'run' AND e.state IN ('final', 'out_of_memory')
AND EXISTS (SELECT FROM trainer_ends n WHERE n.run_id = e.run_id AND n.attempt > e.attempt)
AND (e.state = 'final' OR EXISTS (
    SELECT FROM trainer_ends b WHERE b.run_id = e.run_id AND b.step = e.step AND b.state = e.state AND b.attempt < e.attempt));

\echo question: external rewards that the list of changes does not name with the token that gave them
SELECT e.rollout_id, e.key, e.token_name FROM external_rewards e JOIN rollouts o ON o.id = e.rollout_id
WHERE o.run_id = :'run' AND e.token_name IS NOT NULL AND NOT EXISTS (
    SELECT FROM audit_entries a WHERE a.action = 'create_reward' AND a.subject = e.rollout_id
    AND a.detail ->> 'key' = e.key AND a.token_name = e.token_name);

\echo question: feedback that the list of changes does not name with the token that gave it
SELECT f.rollout_id, f.key, f.token_name FROM feedback f
WHERE f.run_id = :'run' AND f.token_name IS NOT NULL AND NOT EXISTS (
    SELECT FROM audit_entries a WHERE a.action = 'create_feedback' AND a.subject = f.rollout_id
    AND a.detail ->> 'key' = f.key AND a.token_name = f.token_name);

\echo question: components that are not what was given as feedback
SELECT w.rollout_id, w.component, w.state, w.value, f.given, f.value FROM rollout_rewards w
JOIN runs u ON u.id = w.run_id
JOIN LATERAL jsonb_array_elements(u.config #> '{reward,components}') AS c (component)
    ON c.component ->> 'name' = w.component AND c.component ->> 'from' IN ('feedback', 'otlp')
CROSS JOIN LATERAL (
    SELECT count(*) AS given, CASE WHEN c.component ->> 'combine' = 'last'
        THEN (array_agg(value ORDER BY created_at DESC, key DESC))[1] ELSE avg(value) END AS value
    FROM feedback WHERE rollout_id = w.rollout_id AND attempt = w.attempt AND component = w.component) AS f
WHERE w.run_id = :'run' AND w.revision = 1 AND NOT CASE WHEN f.given = 0 THEN w.state = 'failed'
    ELSE w.state = 'scored' AND abs(w.value - f.value) < 1e-9 END;

\echo question: regrades with a gap, equal to the one before, without all components, or not once in the list of changes
SELECT g.rollout_id, g.revision FROM regrades g
LEFT JOIN regrades b ON b.rollout_id = g.rollout_id AND b.attempt = g.attempt AND b.revision = g.revision - 1
WHERE g.run_id = :'run' AND NOT coalesce(
    (g.revision = 2 OR b.revision IS NOT NULL) AND (b.reward, b.total) IS DISTINCT FROM (g.reward, g.total)
    AND (SELECT count(*) FROM rollout_rewards w WHERE w.rollout_id = g.rollout_id AND w.attempt = g.attempt
         AND w.revision = g.revision) = jsonb_array_length(g.reward -> 'components')
    AND (SELECT count(*) FROM audit_entries a WHERE a.action = 'create_regrade' AND a.subject = g.rollout_id
         AND (a.detail ->> 'revision')::integer = g.revision AND a.token_name = g.token_name) = 1, false);
