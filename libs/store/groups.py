"""Progress of runs, groups and rollouts, which the controller reads and writes in bulk statements.

A repeated write is harmless: ids are deterministic, and states only move along `leyden.libs.contracts.states`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import func, select, text
from sqlalchemy.dialects.postgresql import insert

from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.ids import rollout_id
from leyden.libs.contracts.states import OutcomeKind, RolloutState, RunIntent, RunPhase
from leyden.libs.store import failure_rewards, tables
from leyden.libs.store.database import ReadSession, Session
from leyden.libs.store.deliveries import UNSETTLED, WAITS
from leyden.libs.store.rewards import REWARD, SOLVE_RATE

# Over grouped model calls m of outcome o: true when the platform failed one. An agent that succeeded all the same needs
# an answer to a later try of the same request.
_CALL_FAILED = """
    bool_or(m.status = 'failed' AND (o.kind <> 'succeeded' OR NOT EXISTS (
        SELECT FROM model_calls n
        WHERE n.run_id = m.run_id AND n.rollout_id = m.rollout_id AND n.attempt = m.attempt
        AND n.request_sha256 = m.request_sha256 AND n.sequence > m.sequence AND n.status = 'completed')))
"""


@dataclass(frozen=True)
class EvaluationFacts:
    """The progress of an evaluation: `groups` of `expected` are admitted, `open_groups` of them have not ended.

    `policy_version` is the version asked for, None for the last one; `started_version` that of its first group.
    """

    id: str
    number: int
    dataset_id: str
    policy_version: int | None
    rollouts_per_task: int
    expected: int
    groups: int
    open_groups: int
    started_version: int | None = None

    @property
    def finished(self) -> bool:
        """Whether every group has ended."""
        return self.groups >= self.expected and self.open_groups == 0


@dataclass(frozen=True)
class RunFacts:
    """The facts that decide the next phase and admissions of a run.

    `counting_groups`: groups that count or still may (`admission.py` of the controller); `servable_versions`: the
    newest two versions and those of evaluations, if their files exist; `stop_reason`: why training ends early.

    A run that carries a further policy of another one, `lead_run_id`, has the groups and live attempts of that one;
    `lead_phase` is that one's phase. `has_unfinished_policies`: a run that carries one of its policies has steps to do.
    """

    id: str
    config: RunConfig
    intent: RunIntent
    phase: RunPhase
    reason: str | None
    dataset_id: str
    task_count: int
    created_at: datetime
    steps_done: int
    latest_version: int | None
    servable_versions: frozenset[int]
    counting_groups: int
    open_training_groups: int
    next_group: int
    live_attempts: int
    evaluations: tuple[EvaluationFacts, ...] = ()
    stop_reason: str | None = None
    lead_run_id: str | None = None
    lead_phase: RunPhase | None = None
    policy: str | None = None
    has_unfinished_policies: bool = False


@dataclass(frozen=True)
class AttemptFacts:
    """The last attempt of a queued rollout, ended. `kind` is None when its lease expired.

    `failures` counts the rollout's attempts without the cancelled ones. `seconds` is the run time of the attempt.
    `call_failed` is true when the gateway gave up on a model call and no later try of it made up for that.
    `waited_seconds`, `lost_seconds`, `unanswered_seconds` and `answered_seconds` are those of
    `leyden.libs.store.deliveries.WAITS`.
    """

    rollout_id: str
    run_id: str
    attempt: int
    kind: OutcomeKind | None
    reward: float | None
    failures: int
    has_explicit_reward: bool
    seconds: float = 0.0
    waited_seconds: float = 0.0
    lost_seconds: float = 0.0
    unanswered_seconds: float = 0.0
    answered_seconds: float = 0.0
    call_failed: bool = False
    is_evaluation: bool = False


@dataclass(frozen=True)
class QueuedRollout:
    """A queued rollout without a live attempt; `waited_seconds` since its last attempt ended, None before the first."""

    rollout_id: str
    attempt: int
    waited_seconds: float | None
    runner_type: str


@dataclass(frozen=True)
class Resolution:
    """The end of a queued rollout: finished with a reward of its `attempt`, or excluded."""

    rollout_id: str
    state: RolloutState
    attempt: int | None
    reward: float | None
    reason: str


@dataclass(frozen=True)
class Phase:
    """The next phase of a run."""

    run_id: str
    phase: RunPhase
    reason: str | None


@dataclass(frozen=True)
class NewGroup:
    """A group to be admitted; ids are deterministic, so admitting it twice makes one row.

    `has_greedy`: its last sibling is decoded greedily; `replaces`: the lost group whose task it samples again.
    """

    id: str
    run_id: str
    evaluation_id: str | None
    number: int
    dataset_id: str
    task_number: int
    size: int
    admitted_version: int
    has_greedy: bool = False
    replaces: str | None = None

    @property
    def rollout_ids(self) -> list[str]:
        """The siblings, in order."""
        return [rollout_id(self.id, sibling) for sibling in range(self.size)]


@dataclass(frozen=True)
class LostGroup:
    """A training group that credit excluded, or that the trainer refused as too old."""

    id: str
    task_number: int


@dataclass(frozen=True)
class Replacements:
    """The run's groups that sample a lost group's task again: `made` so far, and the lost groups that still `wait`."""

    made: int = 0
    waiting: tuple[LostGroup, ...] = ()


# Why: training groups have consecutive numbers from 0, so the largest number counts them, and partial indexes count the
# few that are cancelled, excluded or stale: the cost does not grow with a run's past.
_RUNS = text("""
    SELECT r.id, r.config, r.intent, r.dataset_id, r.created_at, d.task_count, r.lead_run_id, r.policy,
           (SELECT phase FROM run_status WHERE run_id = r.lead_run_id) AS lead_phase,
           coalesce(s.phase, 'pending') AS phase, s.reason,
           (SELECT max(number) FROM steps WHERE run_id = r.id) AS steps_done,
           (SELECT max(version) FROM policy_versions WHERE run_id = r.id) AS latest_version,
           ARRAY(SELECT version FROM policy_versions p WHERE p.run_id = r.id AND p.pruned_at IS NULL
                 AND version IN (SELECT max(version) - older
                                 FROM policy_versions, (VALUES (0), (1)) AS of (older)
                                 WHERE run_id = r.id GROUP BY older
                                 UNION SELECT policy_version FROM evaluations WHERE run_id = lead.id)) AS servable,
           (SELECT count(*) FROM attempts a JOIN rollouts o ON o.id = a.rollout_id
            WHERE o.run_id = lead.id AND o.state = 'queued' AND a.state IN ('leased', 'running')) AS live_attempts,
           g.next_number - g.cancelled - g.excluded - g.stale - CASE WHEN refills.groups > 0 THEN (
               SELECT coalesce(sum(least(found, refills.groups)), 0) FROM (
                   SELECT count(*) AS found FROM step_groups
                   WHERE run_id = r.id AND verdict = 'no_variance' GROUP BY step
                   UNION ALL
                   SELECT count(*) FROM group_credits c WHERE c.run_id = r.id AND c.verdict = 'credited'
                   AND NOT c.has_variance AND NOT EXISTS (SELECT FROM step_groups
                                                           WHERE group_id = c.group_id AND run_id = c.run_id)
               ) AS without_variance
           ) ELSE 0 END AS counting, g.open, g.next_number
    FROM runs r
    JOIN datasets d ON d.id = r.dataset_id
    LEFT JOIN run_status s ON s.run_id = r.id
    CROSS JOIN LATERAL (SELECT coalesce(r.lead_run_id, r.id) AS id) AS lead
    CROSS JOIN LATERAL (
        SELECT coalesce((r.config #>> '{sampling,refill_zero_variance}')::bigint, 0)
               * (r.config #>> '{sampling,groups_per_step}')::bigint AS groups
    ) AS refills
    CROSS JOIN LATERAL (
        SELECT (SELECT coalesce(max(number) + 1, 0) FROM groups
                WHERE run_id = lead.id AND evaluation_id IS NULL) AS next_number,
               (SELECT count(*) FROM groups
                WHERE run_id = lead.id AND evaluation_id IS NULL AND state = 'cancelled') AS cancelled,
               (SELECT count(*) FROM groups
                WHERE run_id = lead.id AND evaluation_id IS NULL AND state = 'open') AS open,
               (SELECT count(*) FROM group_credits WHERE run_id = r.id AND verdict = 'excluded') AS excluded,
               (SELECT count(*) FROM step_groups WHERE run_id = r.id AND verdict = 'stale') AS stale
    ) g
    WHERE coalesce(s.phase, 'pending') NOT IN ('completed', 'failed', 'cancelled') OR lead.id = ANY(:reopened)
    ORDER BY r.created_at, r.id
""")

_EVALUATIONS = text("""
    SELECT e.id, e.run_id, e.number, e.dataset_id, e.policy_version, e.rollouts_per_task,
           least(d.task_count, coalesce(e.max_tasks, d.task_count)) AS expected, g.groups, g.open, g.started_version
    FROM evaluations e
    JOIN datasets d ON d.id = e.dataset_id
    LEFT JOIN run_status s ON s.run_id = e.run_id
    CROSS JOIN LATERAL (
        SELECT count(*) AS groups, count(*) FILTER (WHERE state = 'open') AS open,
               min(admitted_version) AS started_version
        FROM groups WHERE run_id = e.run_id AND evaluation_id = e.id
    ) g
    WHERE coalesce(s.phase, 'pending') NOT IN ('failed', 'cancelled') AND NOT (e.id = ANY(:finished))
    -- Training that stopped early makes no later versions.
    AND NOT (s.phase IS NOT DISTINCT FROM 'completed' AND coalesce(e.policy_version, 0) > coalesce(
        (SELECT max(version) FROM policy_versions WHERE run_id = e.run_id), 0))
""")

_ENDED = text(f"""
    SELECT r.id AS rollout_id, r.run_id, a.number AS attempt, o.kind, o.reward,
           (SELECT count(*) FROM attempts b LEFT JOIN outcomes p ON p.rollout_id = b.rollout_id AND p.attempt = b.number
            WHERE b.rollout_id = r.id AND p.kind IS DISTINCT FROM 'cancelled') AS failures,
           EXISTS (SELECT FROM rewards w WHERE w.rollout_id = r.id AND w.attempt = a.number)
           OR EXISTS (SELECT FROM external_rewards x
                      WHERE x.rollout_id = r.id AND coalesce(x.attempt, a.number) = a.number) AS explicit,
           coalesce(extract(epoch FROM a.finished_at - a.started_at), 0)::double precision AS seconds,
           coalesce(w.waited, 0) AS waited, coalesce(w.lost, 0) AS lost, coalesce(w.unanswered, 0) AS unanswered,
           coalesce(w.answered, 0) AS answered,
           coalesce(c.failed, false) AS call_failed, g.evaluation_id IS NOT NULL AS is_evaluation
    FROM rollouts r
    JOIN groups g ON g.id = r.group_id
    CROSS JOIN LATERAL (SELECT * FROM attempts WHERE rollout_id = r.id ORDER BY number DESC LIMIT 1) a
    LEFT JOIN outcomes o ON o.rollout_id = r.id AND o.attempt = a.number
    LEFT JOIN LATERAL ({WAITS}) AS w ON o.kind IN ('agent_error', 'timeout', 'succeeded')
    LEFT JOIN LATERAL (
        SELECT {_CALL_FAILED} AS failed FROM model_calls m
        WHERE m.run_id = r.run_id AND m.rollout_id = r.id AND m.attempt = a.number AND m.choice = 0
    ) AS c ON o.kind IN ('agent_error', 'timeout', 'succeeded')
    WHERE r.state = 'queued' AND a.state IN ('settled', 'expired') AND a.number > r.excused_attempt
    AND NOT (o.kind IN ('agent_error', 'timeout', 'succeeded') AND ({UNSETTLED}))
""")  # noqa: S608  # constants alone

_EXCUSE = text("""
    UPDATE rollouts r SET excused_attempt = v.attempt
    FROM unnest(CAST(:ids AS text[]), CAST(:attempts AS integer[])) AS v (id, attempt)
    WHERE r.id = v.id AND r.state = 'queued'
""")

_RESOLVE = text("""
    UPDATE rollouts r
    SET state = v.state, attempt = v.attempt, reward = v.reward, reason = v.reason, finished_at = now()
    FROM unnest(CAST(:ids AS text[]), CAST(:states AS text[]), CAST(:attempts AS integer[]),
                CAST(:rewards AS double precision[]), CAST(:reasons AS text[]))
        AS v (id, state, attempt, reward, reason)
    WHERE r.id = v.id AND r.state = 'queued'
""")

_COMPLETE = text("""
    UPDATE groups g SET state = 'complete', finished_at = now()
    WHERE g.state = 'open' AND NOT EXISTS (SELECT FROM rollouts r WHERE r.group_id = g.id AND r.state = 'queued')
    RETURNING g.id
""")

_QUEUED = text("""
    SELECT r.id AS rollout_id, coalesce(a.number, 0) AS attempt,
           extract(epoch FROM clock_timestamp() - a.finished_at)::double precision AS waited,
           coalesce(u.config #>> '{runner,type}', 'process') AS runner_type
    FROM rollouts r
    JOIN runs u ON u.id = r.run_id
    JOIN groups g ON g.id = r.group_id
    LEFT JOIN LATERAL (
        SELECT number, state, finished_at FROM attempts WHERE rollout_id = r.id ORDER BY number DESC LIMIT 1) a ON true
    WHERE r.state = 'queued' AND u.intent = 'running'
    AND (a.number IS NULL OR a.state IN ('settled', 'expired') AND a.number <= r.excused_attempt)
    ORDER BY g.created_at, g.number, r.sibling
""")

_CANCEL_ROLLOUTS = text("""
    UPDATE rollouts SET state = 'cancelled', reason = :reason, finished_at = now()
    WHERE state = 'queued' AND run_id = ANY(:runs)
""")

_CANCEL_GROUPS = text("""
    UPDATE groups SET state = 'cancelled', finished_at = now() WHERE state = 'open' AND run_id = ANY(:runs)
""")

_STOP_ROLLOUTS = text("""
    UPDATE rollouts r SET state = 'cancelled', reason = 'training stopped early', finished_at = now()
    FROM groups g WHERE g.id = r.group_id AND g.evaluation_id IS NULL AND r.state = 'queued' AND r.run_id = :run
""")

_STOP_GROUPS = text("""
    UPDATE groups SET state = 'cancelled', finished_at = now()
    WHERE state = 'open' AND evaluation_id IS NULL AND run_id = :run
""")

# The plan's evaluations are the run's first; others may be on other datasets.
_EVALUATION_REWARDS = text(f"""
    SELECT groups.admitted_version, avg({REWARD})
    FROM evaluations e
    JOIN groups ON groups.evaluation_id = e.id
    JOIN rollouts ON rollouts.group_id = groups.id AND rollouts.state = 'finished'
    WHERE e.run_id = :run AND e.id = ANY(:finished)
    AND e.dataset_id = (SELECT dataset_id FROM evaluations WHERE run_id = :run ORDER BY number LIMIT 1)
    GROUP BY 1 ORDER BY 1
""")  # noqa: S608  # constants alone

_STEP_REWARDS = text(f"""
    SELECT s.step, avg({REWARD})
    FROM step_groups s JOIN rollouts ON rollouts.group_id = s.group_id AND rollouts.state = 'finished'
        AND NOT rollouts.greedy
    WHERE s.run_id = :run AND s.step IS NOT NULL GROUP BY 1 ORDER BY 1
""")  # noqa: S608  # constants alone

_SOLVE_RATES = text(f"""
    SELECT g.task_number, {SOLVE_RATE} AS rate
    FROM (
        SELECT id, task_number FROM groups WHERE run_id = :run AND evaluation_id IS NULL AND state = 'complete'
        ORDER BY number DESC LIMIT :window
    ) g JOIN rollouts ON rollouts.group_id = g.id AND rollouts.state = 'finished' AND NOT rollouts.greedy
    GROUP BY g.task_number
""")  # noqa: S608  # constants alone

# A task that is lost twice is not sampled a third time before its next turn: it may be the task that is broken.
_LOST = text("""
    SELECT g.id, g.task_number FROM (
        SELECT group_id FROM group_credits WHERE run_id = :run AND verdict = 'excluded'
        UNION
        SELECT group_id FROM step_groups WHERE run_id = :run AND verdict = 'stale'
    ) lost JOIN groups g ON g.id = lost.group_id
    WHERE g.run_id = :run AND g.evaluation_id IS NULL AND g.replaces IS NULL
    AND NOT EXISTS (SELECT FROM groups other WHERE other.run_id = :run AND other.replaces = g.id)
    ORDER BY g.number
""")

_PHASES = text("""
    INSERT INTO run_status AS s (run_id, phase, reason, started_at, finished_at)
    SELECT v.id, v.phase, v.reason, CASE WHEN v.phase IN ('running', 'evaluating') THEN now() END,
           CASE WHEN v.phase IN ('completed', 'failed', 'cancelled') THEN now() END
    FROM unnest(CAST(:ids AS text[]), CAST(:phases AS text[]), CAST(:reasons AS text[])) AS v (id, phase, reason)
    ON CONFLICT (run_id) DO UPDATE SET
        phase = excluded.phase, reason = excluded.reason, finished_at = excluded.finished_at,
        started_at = coalesce(s.started_at, excluded.started_at),
        updated_at = CASE WHEN s.phase = excluded.phase THEN s.updated_at ELSE now() END
""")

# A run whose groups never had a success ends after all its groups, where it has fewer than the limit. Otherwise the
# groups of the present phase count, so that a resumed run has a chance.
_WITHOUT_SUCCESS = text("""
    SELECT s.run_id, (array_agg(latest.detail ORDER BY r.finished_at DESC))[1] AS detail
    FROM run_status s
    JOIN runs u ON u.id = s.run_id
    CROSS JOIN LATERAL (
        SELECT least(:groups, greatest(1, (u.config #>> '{training,steps}')::bigint
                                          * (u.config #>> '{sampling,groups_per_step}')::bigint)) AS groups
    ) AS needed
    CROSS JOIN LATERAL (
        SELECT NOT EXISTS (
            SELECT FROM groups g JOIN rollouts o ON o.group_id = g.id
            WHERE g.run_id = s.run_id AND g.evaluation_id IS NULL AND o.reason = 'succeeded') AS always
    ) AS failed
    CROSS JOIN LATERAL (
        SELECT id FROM groups g
        WHERE g.run_id = s.run_id AND g.evaluation_id IS NULL AND g.state = 'complete'
            AND (failed.always OR g.created_at >= s.updated_at)
        ORDER BY number DESC LIMIT :groups
    ) g
    JOIN rollouts r ON r.group_id = g.id
    LEFT JOIN LATERAL (
        SELECT concat_ws(': ', coalesce(nullif(r.reason, 'succeeded'), o.kind), o.detail,
                         nullif(right(o.stderr_tail, 500), '')) AS detail
        FROM outcomes o WHERE o.rollout_id = r.id ORDER BY o.attempt DESC LIMIT 1
    ) latest ON true
    WHERE s.phase = 'running'
    GROUP BY s.run_id, needed.groups
    HAVING count(DISTINCT g.id) >= needed.groups AND NOT bool_or(r.reason = 'succeeded')
""")


async def load_runs(session: ReadSession, finished_evaluations: Iterable[str] = ()) -> list[RunFacts]:
    """Every run that is not over, and completed ones that have an unfinished evaluation, oldest first.

    Args: finished_evaluations: finished for good; the query skips their counts
    """
    evaluations: dict[str, list[EvaluationFacts]] = {}
    for row in await session.execute(_EVALUATIONS, {"finished": list(finished_evaluations)}):
        evaluations.setdefault(row.run_id, []).append(_evaluation(row))
    reopened = [run for run, found in evaluations.items() if not all(one.finished for one in found)]
    rows = await session.execute(_RUNS, {"reopened": reopened})
    return [_run(row, evaluations.get(row.id, [])) for row in rows]


async def run_configs(session: ReadSession, run_ids: Iterable[str]) -> dict[str, RunConfig]:
    """Configurations by run id."""
    rows = await session.execute(select(tables.Run.id, tables.Run.config).where(tables.Run.id.in_(list(run_ids))))
    return {row.id: RunConfig.stored(row.config) for row in rows}


async def ended_attempts(session: ReadSession) -> list[AttemptFacts]:
    """Queued rollouts whose last attempt has ended, once all is known of its requests, for the controller to judge."""
    return [
        AttemptFacts(
            rollout_id=row.rollout_id,
            run_id=row.run_id,
            attempt=row.attempt,
            kind=None if row.kind is None else OutcomeKind(row.kind),
            reward=row.reward,
            failures=row.failures,
            has_explicit_reward=row.explicit,
            seconds=row.seconds,
            waited_seconds=row.waited,
            lost_seconds=row.lost,
            unanswered_seconds=row.unanswered,
            answered_seconds=row.answered,
            call_failed=row.call_failed,
            is_evaluation=row.is_evaluation,
        )
        for row in await session.execute(_ENDED)
    ]


async def resolve_rollouts(session: Session, resolutions: Sequence[Resolution]) -> None:
    """Ends rollouts. Idempotency key: the rollout; one that has ended already stays as it is."""
    if resolutions:
        columns = {
            "ids": [one.rollout_id for one in resolutions],
            "states": [str(one.state) for one in resolutions],
            "attempts": [one.attempt for one in resolutions],
            "rewards": [one.reward for one in resolutions],
            "reasons": [one.reason for one in resolutions],
        }
        await session.execute(_RESOLVE, columns)


async def excuse_attempts(session: Session, attempts: Mapping[str, int]) -> None:
    """Lets rollouts run again after attempts that the platform failed. Idempotency key: rollout and attempt.

    Args: attempts: numbers by rollout
    """
    if attempts:
        await session.execute(_EXCUSE, {"ids": list(attempts), "attempts": list(attempts.values())})


async def complete_groups(session: Session) -> list[str]:
    """Completes every open group whose rollouts have all ended, and rewards its failures; their ids."""
    complete = list(await session.scalars(_COMPLETE))
    if complete:
        await failure_rewards.decide(session, complete)
    return complete


async def queued_rollouts(session: ReadSession) -> list[QueuedRollout]:
    """Rollouts that wait for an attempt, in the order of admission; none of paused runs."""
    rows = await session.execute(_QUEUED)
    return [QueuedRollout(row.rollout_id, row.attempt, row.waited, row.runner_type) for row in rows]


async def admit_groups(session: Session, groups: Sequence[NewGroup], trace_parents: Mapping[str, str]) -> None:
    """Writes groups and their rollouts. Idempotency key: the deterministic ids; what exists stays as it is.

    Args: trace_parents: rollout id to W3C trace context.
    """
    if not groups:
        return
    rows = [{name: value for name, value in asdict(group).items() if name != "has_greedy"} for group in groups]
    await session.execute(insert(tables.Group).on_conflict_do_nothing(), rows)
    rollouts = [
        {
            "id": rollout,
            "run_id": group.run_id,
            "group_id": group.id,
            "sibling": sibling,
            "greedy": group.has_greedy and sibling == group.size - 1,
            "trace_parent": trace_parents.get(rollout),
        }
        for group in groups
        for sibling, rollout in enumerate(group.rollout_ids)
    ]
    await session.execute(insert(tables.Rollout).on_conflict_do_nothing(), rollouts)


async def causes_of_leads(session: ReadSession, causes: Mapping[str, str]) -> dict[str, str]:
    """The failures of the runs one of whose policies failed.

    Args: causes: failures by run
    """
    table = tables.Run
    query = select(table.lead_run_id, table.policy, table.id).where(
        table.id.in_(list(causes)), table.lead_run_id.is_not(None)
    )
    return {row.lead_run_id: f"policy {row.policy}: {causes[row.id]}" for row in await session.execute(query)}


async def write_phases(session: Session, phases: Sequence[Phase]) -> None:
    """Moves runs to their next phases; `started_at` is the first start of work, `finished_at` the last end."""
    if not phases:
        return
    columns = {
        "ids": [one.run_id for one in phases],
        "phases": [str(one.phase) for one in phases],
        "reasons": [one.reason for one in phases],
    }
    await session.execute(_PHASES, columns)


async def cancel_open_work(session: Session, run_ids: Sequence[str], reason: str) -> None:
    """Cancels queued rollouts and open groups of runs; runners notice at their next heartbeat."""
    await session.execute(_CANCEL_ROLLOUTS, {"runs": list(run_ids), "reason": reason})
    await session.execute(_CANCEL_GROUPS, {"runs": list(run_ids)})


async def cancel_training(session: Session, run_id: str) -> None:
    """Cancels queued rollouts and open groups of training; evaluations go on."""
    await session.execute(_STOP_ROLLOUTS, {"run": run_id})
    await session.execute(_STOP_GROUPS, {"run": run_id})


async def evaluation_rewards(session: ReadSession, run_id: str, finished: Iterable[str]) -> list[tuple[int, float]]:
    """Measured versions with their mean rewards, in the order of versions.

    Args: finished: ids of evaluations; those on another dataset than the plan's are left out
    """
    rows = await session.execute(_EVALUATION_REWARDS, {"run": run_id, "finished": list(finished)})
    return [(version, reward) for version, reward in rows]


async def step_rewards(session: ReadSession, run_id: str) -> list[tuple[int, float]]:
    """Steps with the mean rewards of their rollouts, in their order."""
    return [(step, reward) for step, reward in await session.execute(_STEP_REWARDS, {"run": run_id})]


async def solve_rates(session: ReadSession, run_id: str, solved_at: float, window: int) -> dict[int, float]:
    """The share of finished rollouts with at least the reward `solved_at`, by task, in the newest `window` complete
    training groups."""
    scope = {"run": run_id, "solved_at": solved_at, "window": window}
    return {row.task_number: row.rate for row in await session.execute(_SOLVE_RATES, scope)}


async def replacements(session: ReadSession, run_id: str) -> Replacements:
    """The run's lost groups whose task no other group has sampled since, in their order, and the number of others."""
    table = tables.Group
    made = select(func.count()).where(table.run_id == run_id, table.replaces.is_not(None))
    lost = await session.execute(_LOST, {"run": run_id})
    return Replacements(await session.scalar(made) or 0, tuple(LostGroup(*row) for row in lost))


async def runs_without_success(session: ReadSession, groups: int) -> dict[str, str]:
    """Running runs without a success in their last `groups` training groups of this phase, with the last cause."""
    rows = await session.execute(_WITHOUT_SUCCESS, {"groups": groups})
    return {row.run_id: row.detail or "every lease was lost" for row in rows}


def _evaluation(row: Any) -> EvaluationFacts:
    return EvaluationFacts(
        id=row.id,
        number=row.number,
        dataset_id=row.dataset_id,
        policy_version=row.policy_version,
        rollouts_per_task=row.rollouts_per_task,
        expected=row.expected,
        groups=row.groups,
        open_groups=row.open,
        started_version=row.started_version,
    )


def _run(row: Any, evaluations: Sequence[EvaluationFacts]) -> RunFacts:
    return RunFacts(
        id=row.id,
        config=RunConfig.stored(row.config),
        intent=RunIntent(row.intent),
        phase=RunPhase(row.phase),
        reason=row.reason,
        dataset_id=row.dataset_id,
        task_count=row.task_count,
        created_at=row.created_at,
        steps_done=row.steps_done or 0,
        latest_version=row.latest_version,
        servable_versions=frozenset(row.servable),
        counting_groups=int(row.counting or 0),
        open_training_groups=row.open or 0,
        next_group=row.next_number or 0,
        live_attempts=row.live_attempts,
        evaluations=tuple(evaluations),
        lead_run_id=row.lead_run_id,
        lead_phase=None if row.lead_phase is None else RunPhase(row.lead_phase),
        policy=row.policy,
    )
