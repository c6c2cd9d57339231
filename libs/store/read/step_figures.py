"""Figures of steps that nobody writes: of the groups, calls and times behind each, computed from rows at each request.

Numbers that a trainer writes although it measured nothing are unknown here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import TextClause, text

from leyden.libs.contracts.api.runs import NextStep, Step
from leyden.libs.contracts.config import RunConfig
from leyden.libs.store.database import ReadSession
from leyden.libs.store.rewards import SIBLING

OF_COMPUTED_TOKENS = frozenset({
    "loss", "gradient_norm", "kl_reference", "clipped_share", "clipped_share_last", "masked_share",
    "importance_mean", "effective_sample_share", "sharing_ratio", "kl_teacher", "value_loss", "value_mean",
    "value_explained_variance", "value_gradient_norm",
})  # fmt: skip
"""Metrics that a step without a computed token has no value for; its trainer writes one all the same."""
OF_TRAINABLE_TOKENS = frozenset({"policy_lag_mean", "policy_lag_max"})

_GROUPS = text("""
    SELECT step, avg(credit.reward_std) AS group_reward_std,
        avg(credit.has_variance::int)::float8 AS groups_with_variance_share
    FROM step_groups JOIN group_credits AS credit USING (group_id, run_id)
    WHERE run_id = :policy AND step IS NOT NULL GROUP BY step
""")

# A stale group is refused while the trainer looks for the groups of its next step.
_STALE = text("""
    SELECT 1 + coalesce((SELECT max(number) FROM steps
                         WHERE run_id = :policy AND steps.created_at <= refused.created_at), 0) AS step,
        count(*) AS groups_stale
    FROM step_groups AS refused WHERE run_id = :policy AND verdict = 'stale' GROUP BY 1
""")

# No version sampled demonstrations.
_LAGS = text("""
    SELECT used.step, used.step - 1 - samples.min_policy_version AS lag, sum(samples.trained_tokens)::bigint AS tokens
    FROM (
        SELECT step, sample_id FROM step_samples WHERE run_id = :policy
        UNION ALL
        SELECT replays.step, samples.id FROM step_replays AS replays
        JOIN samples ON samples.run_id = :policy AND samples.group_id = replays.group_id
        WHERE replays.run_id = :policy
    ) AS used JOIN samples ON samples.run_id = :policy AND samples.id = used.sample_id
    WHERE samples.min_policy_version >= 0
    GROUP BY 1, 2
""")

# All attempts cost; an answer that was cut off by its client has no length of its own.
_TOKENS = text("""
    SELECT step_groups.step, sum(prompt_tokens)::bigint AS prompt_tokens, sum(cached_tokens)::bigint AS cached_tokens,
        sum(completion_tokens)::bigint AS sampled_tokens,
        sum(cached_tokens)::float8 / nullif(sum(prompt_tokens), 0) AS cached_share,
        avg(completion_tokens) FILTER (WHERE status = 'completed')::float8 AS answer_tokens_mean
    FROM step_groups JOIN rollouts ON rollouts.group_id = step_groups.group_id
    JOIN model_calls AS calls ON calls.run_id = :run AND calls.rollout_id = rollouts.id
    JOIN policies ON policies.id = :policy
    WHERE step_groups.run_id = :policy AND step_groups.step IS NOT NULL
        AND (calls.role = ANY(:roles) OR policies.name = '' AND (calls.role IS NULL OR NOT calls.role = ANY(:others)))
    GROUP BY step_groups.step
""")

# From the admission of a rollout to the trainer, part by part, by its counted attempt. Demonstrations were made
# for another run.
_TIMES = text(f"""
    SELECT step_groups.step,
        avg(extract(epoch FROM tried.started_at - rollouts.created_at))::float8 AS queue_seconds,
        avg(extract(epoch FROM tried.finished_at - tried.started_at))::float8 AS sample_seconds,
        avg(extract(epoch FROM gradings.settled_at - tried.finished_at))::float8 AS grade_seconds,
        avg(extract(epoch FROM groups.finished_at - coalesce(gradings.settled_at, tried.finished_at)))::float8
            AS siblings_seconds,
        avg(extract(epoch FROM credit.created_at - groups.finished_at))::float8 AS credit_seconds,
        avg(extract(epoch FROM steps.started_at - credit.created_at))::float8 AS ready_seconds
    FROM step_groups JOIN steps ON steps.run_id = step_groups.run_id AND steps.number = step_groups.step
    JOIN group_credits AS credit ON credit.group_id = step_groups.group_id AND credit.run_id = step_groups.run_id
    JOIN groups ON groups.id = step_groups.group_id
    JOIN rollouts ON rollouts.group_id = groups.id AND rollouts.state = 'finished' AND {SIBLING}
    JOIN attempts AS tried ON tried.rollout_id = rollouts.id AND tried.number = rollouts.attempt
    LEFT JOIN gradings ON gradings.rollout_id = rollouts.id AND gradings.attempt = rollouts.attempt
    WHERE step_groups.run_id = :policy AND rollouts.run_id = :run GROUP BY step_groups.step
""")  # noqa: S608  # constants alone

_JUDGED = text("""
    SELECT step_groups.step, count(*) AS judged_components
    FROM step_groups JOIN rollouts ON rollouts.group_id = step_groups.group_id
    JOIN rollout_rewards AS grades ON grades.rollout_id = rollouts.id
    WHERE step_groups.run_id = :policy AND step_groups.step IS NOT NULL AND rollouts.run_id = :run
        AND grades.source IN ('score_model', 'relative_model') AND grades.state = 'scored'
        -- A step shows the numbers that it trained on, whatever a later grading says.
        AND grades.revision = 1
    GROUP BY step_groups.step
""")

# Step n makes version n, which engines load while it is the newest.
_SWAPS = text("""
    SELECT policy_version AS step, avg(seconds) AS swap_seconds_mean, max(seconds) AS swap_seconds_max
    FROM weight_swaps WHERE run_id = :policy AND policy_version > 0 GROUP BY 1
""")

# Rollouts of evaluations wait for the same engines. A second attempt waits, too, and is not counted.
_QUEUED = text("""
    WITH moments AS (
        SELECT created_at AS at, 1 AS change, NULL::integer AS step FROM rollouts WHERE run_id = :run
        UNION ALL
        SELECT moment, -1, NULL FROM rollouts LEFT JOIN attempts AS tried ON tried.rollout_id = rollouts.id
            AND tried.number = 1
        CROSS JOIN LATERAL (SELECT coalesce(tried.created_at, rollouts.finished_at) AS moment) AS begun
        WHERE rollouts.run_id = :run AND moment IS NOT NULL
        UNION ALL
        SELECT created_at, 0, number FROM steps WHERE run_id = :policy
    )
    SELECT step, queued::float8 AS queued_rollouts
    FROM (SELECT step, sum(change) OVER (ORDER BY at) AS queued FROM moments) AS counted WHERE step IS NOT NULL
""")

# Step 1 has the start of engines and trainer in its time, and counts while it is the only one.
_PACE = text("""
    SELECT asked.run_id, coalesce(
            percentile_cont(0.5) WITHIN GROUP (ORDER BY extract(epoch FROM made.created_at - made.before)::float8),
            extract(epoch FROM max(made.created_at - status.started_at) FILTER (WHERE made.number = 1))::float8
        ) AS median, extract(epoch FROM clock_timestamp() - max(made.created_at))::float8 AS since
    FROM unnest(CAST(:run_ids AS text[])) AS asked (run_id)
    JOIN run_status AS status ON status.run_id = asked.run_id AND status.phase = 'running'
    CROSS JOIN LATERAL (
        SELECT number, created_at, lag(created_at) OVER (ORDER BY number) AS before
        FROM (
            SELECT number, created_at FROM steps WHERE steps.run_id = asked.run_id ORDER BY number DESC LIMIT 21
        ) AS newest
    ) AS made
    GROUP BY asked.run_id
""")

# Samples of a step come from groups that credit has finished, the first ones first.
_NEXT_STEP = text("""
    SELECT count(*) AS groups, coalesce(sum(made), 0) AS rollouts, coalesce(sum(ended), 0) AS ended,
        coalesce(sum(graded), 0) AS graded, coalesce(sum(made) FILTER (WHERE is_credited), 0) AS credited
    FROM (
        SELECT counted.made, credit.group_id IS NOT NULL AS is_credited, counted.ended, counted.graded
        FROM groups LEFT JOIN group_credits AS credit
            ON credit.group_id = groups.id AND credit.run_id = groups.run_id
        CROSS JOIN LATERAL (
            SELECT count(*) AS made,
                count(*) FILTER (WHERE state <> 'queued' OR grading_attempt > excused_attempt) AS ended,
                count(*) FILTER (WHERE state <> 'queued') AS graded
            FROM rollouts WHERE rollouts.group_id = groups.id AND rollouts.rerolls_of IS NULL
        ) AS counted
        WHERE groups.run_id = :run AND groups.evaluation_id IS NULL AND groups.state <> 'cancelled'
            AND credit.verdict IS DISTINCT FROM 'excluded'
            AND NOT EXISTS (SELECT FROM step_groups AS used
                            WHERE used.group_id = groups.id AND used.run_id = groups.run_id)
        ORDER BY is_credited DESC, counted.graded DESC, counted.ended DESC, groups.number LIMIT :groups
    ) AS chosen
""")

Figures = Mapping[int, Mapping[str, float]]


def known(metrics: Mapping[str, float | None], *, has_reference: bool) -> dict[str, float | None]:
    """The metrics of a step, with null for those that it has not measured.

    Args: has_reference: whether the policy is held to another one; without, its trainer writes a KL of 0

    >>> known({"computed_tokens": 0, "entropy": -0.0, "samples": 0}, has_reference=True)
    {'computed_tokens': 0, 'entropy': None, 'samples': 0}
    """
    unknown = set[str]() if has_reference else {"kl_reference"}
    if metrics.get("computed_tokens") == 0:
        unknown |= OF_COMPUTED_TOKENS
        # Such a step's entropy is that of groups without variance. Trainers up to 0.2.0 left these out and wrote 0.
        unknown |= set() if metrics.get("entropy") else {"entropy"}
    if metrics.get("trainable_tokens") == 0:
        unknown |= OF_TRAINABLE_TOKENS
    return {name: None if name in unknown else value for name, value in metrics.items()}


async def read_figures(
    session: ReadSession, policy: str, run: str, steps: Sequence[Step], roles: Sequence[str], others: Sequence[str]
) -> Figures:
    """The figures of a policy's steps by name; one that is unknown is not there.

    Args: policy, run: ids; roles: those whose calls the policy answers; others: those of other policies and providers
    """
    scope = {"policy": policy, "run": run, "roles": list(roles), "others": list(others)}
    found = defaultdict[int, dict[str, float]](dict)
    for query in (_GROUPS, _TOKENS, _TIMES, _JUDGED, _SWAPS, _QUEUED):
        for number, name, value in await _rows(session, query, scope):
            found[number][name] = value
    stale = {number: value for number, _, value in await _rows(session, _STALE, scope)}
    of_lags = await _lags(session, scope)
    total: float | None = 0
    for before, one in zip((None, *steps), steps, strict=False):
        figures = found[one.number]
        figures |= {"groups_stale": stale.get(one.number, 0), **of_lags.get(one.number, {})}
        figures |= dict(_of_step(one, before, figures.get("sampled_tokens")))
        tokens = one.metrics.get("trained_tokens")
        # From a step whose tokens are unknown on, the sum is.
        total = None if total is None or tokens is None else total + tokens
        if total is not None:
            figures["trained_tokens_total"] = total
    return found


async def read_paces(session: ReadSession, run_ids: Sequence[str]) -> dict[str, tuple[float, float]]:
    """The median seconds of the newest steps and those since the last, by runs that train and have made a step."""
    rows = await session.execute(_PACE, {"run_ids": list(run_ids)})
    return {row.run_id: (row.median, row.since) for row in rows if row.median is not None}


async def next_step(session: ReadSession, run_id: str, number: int, config: RunConfig) -> NextStep:
    """The next step of a run as far as its groups have come. Args: number: that of the step"""
    groups, size = config.sampling.groups_per_step, config.sampling.group_size
    size += config.credit.baseline.type == "remax"  # A greedy sibling.
    row = (await session.execute(_NEXT_STEP, {"run": run_id, "groups": groups})).one()
    missing = (groups - row.groups) * size
    return NextStep(
        number=number, rollouts=row.rollouts + missing, ended=row.ended, graded=row.graded, credited=row.credited
    )


async def _rows(session: ReadSession, query: TextClause, scope: Mapping[str, Any]) -> list[tuple[int, str, float]]:
    """Each known number as step, name and value."""
    rows = (await session.execute(query, scope)).mappings()
    return [
        (row["step"], name, value)
        for row in rows
        for name, value in row.items()
        if name != "step" and value is not None
    ]


async def _lags(session: ReadSession, scope: Mapping[str, Any]) -> dict[int, dict[str, float]]:
    """By step the trained tokens of each lag: a step whose samples are there has 0 of those that it lacks."""
    rows = (await session.execute(_LAGS, scope)).all()
    names = {f"lag.{lag}.tokens": 0.0 for lag in sorted({row.lag for row in rows})}
    found = {row.step: dict(names) for row in rows}
    for row in rows:
        found[row.step][f"lag.{row.lag}.tokens"] = row.tokens
    return found


def _of_step(step: Step, before: Step | None, sampled_tokens: float | None) -> Iterator[tuple[str, float]]:
    """Figures of a step's own row. Args: before: the step before it"""
    if step.calls.calls:
        yield "cut_share", step.calls.cut / step.calls.calls
        if step.rollouts:
            yield "calls_per_rollout", step.calls.calls / step.rollouts
    tokens, seconds = step.metrics.get("trained_tokens"), step.metrics.get("step_seconds")
    if tokens is not None and seconds:
        yield "trained_tokens_per_second", tokens / seconds
    if before is None:
        return
    yield "wait_seconds", (step.started_at - before.created_at).total_seconds()
    between = (step.created_at - before.created_at).total_seconds()
    if sampled_tokens is not None and between > 0:
        yield "sampled_tokens_per_second", sampled_tokens / between
