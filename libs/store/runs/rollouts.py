"""Rollouts between two attempts: the controller ends them or lets them run again, in bulk statements.

A repeated write is harmless: states only move along `leyden.libs.contracts.states`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import text

from leyden.libs.contracts.states import DIVERGED, OutcomeKind, RolloutState
from leyden.libs.store.attempts import MAY_RUN, RUNNER_TYPE
from leyden.libs.store.database import ReadSession, Session
from leyden.libs.store.records.deliveries import FAILED_REQUESTS, UNSETTLED, WAITS
from leyden.libs.store.runs import failure_rewards

# Whether the platform failed a request of attempt a with outcome o. An agent that succeeded all the same needs an
# answer to a later try of the same request.
_CALL_FAILED = f"""
    o.kind IN ('agent_error', 'timeout', 'succeeded') AND EXISTS (
        SELECT FROM ({FAILED_REQUESTS}) AS f
        WHERE o.kind <> 'succeeded' OR NOT EXISTS (
            SELECT FROM model_calls n
            WHERE n.run_id = r.run_id AND n.rollout_id = r.id AND n.attempt = a.number
            AND n.sequence > f.sequence AND n.status = 'completed'
            AND (n.request_sha256 = f.request_sha256 OR f.request_sha256 = '')))
"""  # noqa: S608  # constants alone

# Whether attempt a of re-roll r left the recorded calls, or sent no request after the answer to the last of them. Tries
# that failed are no answers: the gateway does not count them, either.
_DIVERGED = f"""(
    EXISTS (
        SELECT FROM model_calls c WHERE c.run_id = r.run_id AND c.rollout_id = r.id AND c.attempt = a.number
        AND c.status = 'refused' AND c.finish_reason = '{DIVERGED}')
    OR NOT EXISTS (
        SELECT FROM model_calls c WHERE c.run_id = r.run_id AND c.rollout_id = r.id AND c.attempt = a.number
        AND c.sequence > (
            SELECT min(d.sequence) FROM model_calls d
            WHERE d.run_id = r.run_id AND d.rollout_id = r.id AND d.attempt = a.number AND d.status = 'completed'
            GROUP BY d.request_id ORDER BY 1 OFFSET r.from_call - 1 LIMIT 1)))
"""  # noqa: S608  # constants alone


@dataclass(frozen=True)
class AttemptFacts:
    """The last attempt of a queued rollout, ended. `kind` is None when its lease expired.

    `failures` counts the rollout's attempts without the cancelled ones. `seconds` is the run time of the attempt.
    `call_failed` is true when the gateway failed a request to the model and no later try of it made up for that.
    `waited_seconds`, `lost_seconds`, `unanswered_seconds` and `answered_seconds` are those of
    `leyden.libs.store.records.deliveries.WAITS`. `total` is that of a settled grading, None where it has none.
    `was_cut_off`: an endpoint did not answer, or was not watched, while the attempt ran, which ended well without a
    reward of its own.
    `lost_gateway`: the gateway did not answer, or was not watched, while the attempt ran, and the attempt got no answer
    after that.
    `feedback`: the components to which the attempt got a value.
    `diverged`: a re-roll sent a request that is not the recorded one, or no request after the recorded ones.
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
    is_graded: bool = False
    total: float | None = None
    was_cut_off: bool = False
    lost_gateway: bool = False
    feedback: frozenset[str] = frozenset()
    diverged: bool = False


@dataclass(frozen=True)
class QueuedRollout:
    """A rollout that waits for an attempt; one that is not due rests after a failure of the platform."""

    rollout_id: str
    runner_type: str
    is_due: bool = True


@dataclass(frozen=True)
class Resolution:
    """The end of a queued rollout: finished with a reward of its `attempt`, or excluded."""

    rollout_id: str
    state: RolloutState
    attempt: int | None
    reward: float | None
    reason: str


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
           coalesce({_CALL_FAILED}, false) AS call_failed, g.evaluation_id IS NOT NULL AS is_evaluation,
           d.rollout_id IS NOT NULL AS is_graded, d.total, o.endpoint_down IS NOT NULL AS was_cut_off,
           coalesce(w.last_answer / 1e9, 0) <= extract(epoch FROM a.finished_at) - o.gateway_down_seconds
               AS lost_gateway,
           ARRAY(SELECT f.component FROM feedback f WHERE f.rollout_id = r.id AND f.attempt = a.number) AS feedback,
           r.from_call IS NOT NULL AND {_DIVERGED} AS diverged
    FROM rollouts r
    JOIN groups g ON g.id = r.group_id
    CROSS JOIN LATERAL (SELECT * FROM attempts WHERE rollout_id = r.id ORDER BY number DESC LIMIT 1) a
    LEFT JOIN outcomes o ON o.rollout_id = r.id AND o.attempt = a.number
    LEFT JOIN gradings d ON d.rollout_id = r.id AND d.attempt = a.number AND d.settled_at IS NOT NULL
    LEFT JOIN LATERAL ({WAITS}) AS w ON o.kind IN ('agent_error', 'timeout', 'succeeded')
    WHERE r.state = 'queued' AND a.state IN ('settled', 'expired') AND a.number > r.excused_attempt
    AND (r.grading_attempt IS DISTINCT FROM a.number OR d.rollout_id IS NOT NULL)
    AND NOT (o.kind IN ('agent_error', 'timeout', 'succeeded') AND ({UNSETTLED}))
""")  # noqa: S608  # constants alone

_EXCUSE = text("""
    UPDATE rollouts r SET excused_attempt = v.attempt, due_at = clock_timestamp() + make_interval(secs => v.rest)
    FROM unnest(CAST(:ids AS text[]), CAST(:attempts AS integer[]), CAST(:rests AS double precision[]))
        AS v (id, attempt, rest)
    WHERE r.id = v.id AND r.state = 'queued'
""")

_GRADE = text("""
    UPDATE rollouts r SET grading_attempt = v.attempt
    FROM unnest(CAST(:ids AS text[]), CAST(:attempts AS integer[])) AS v (id, attempt)
    WHERE r.id = v.id AND r.state = 'queued'
""")

_RESOLVE = text("""
    UPDATE rollouts r
    SET state = v.state, attempt = v.attempt, reward = v.reward, reason = v.reason, finished_at = clock_timestamp()
    FROM unnest(CAST(:ids AS text[]), CAST(:states AS text[]), CAST(:attempts AS integer[]),
                CAST(:rewards AS double precision[]), CAST(:reasons AS text[]))
        AS v (id, state, attempt, reward, reason)
    WHERE r.id = v.id AND r.state = 'queued'
""")

_COMPLETE = text("""
    UPDATE groups g SET state = 'complete', finished_at = clock_timestamp()
    WHERE g.state = 'open' AND NOT EXISTS (SELECT FROM rollouts r WHERE r.group_id = g.id AND r.state = 'queued')
    RETURNING g.id
""")

_QUEUED = text(f"""
    SELECT r.id AS rollout_id, {RUNNER_TYPE} AS runner_type, r.due_at <= clock_timestamp() AS is_due
    FROM rollouts r
    JOIN runs u ON u.id = r.run_id
    JOIN groups g ON g.id = r.group_id
    WHERE {MAY_RUN}
    ORDER BY g.created_at, g.number, r.sibling
""")  # noqa: S608  # constants alone


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
            is_graded=row.is_graded,
            total=row.total,
            was_cut_off=row.was_cut_off,
            lost_gateway=bool(row.lost_gateway),
            feedback=frozenset(row.feedback),
            diverged=row.diverged,
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


async def excuse_attempts(session: Session, attempts: Mapping[str, int], rests: Mapping[str, float]) -> None:
    """Lets rollouts run again after attempts that the platform failed. Idempotency key: rollout and attempt.

    Args:
        attempts: numbers by rollout
        rests: seconds by rollout until the next attempt may begin
    """
    if attempts:
        ids = list(attempts)
        columns = {"ids": ids, "attempts": [attempts[one] for one in ids], "rests": [rests[one] for one in ids]}
        await session.execute(_EXCUSE, columns)


async def await_grades(session: Session, attempts: Mapping[str, int]) -> None:
    """Hands attempts that are to count to the graders. Idempotency key: rollout and attempt.

    Args: attempts: numbers by rollout
    """
    if attempts:
        await session.execute(_GRADE, {"ids": list(attempts), "attempts": list(attempts.values())})


async def complete_groups(session: Session) -> list[str]:
    """Completes every open group whose rollouts have all ended, and rewards its failures; their ids."""
    complete = list(await session.scalars(_COMPLETE))
    if complete:
        await failure_rewards.decide(session, complete)
    return complete


async def queued_rollouts(session: ReadSession) -> list[QueuedRollout]:
    """Rollouts that wait for an attempt, in the order of admission; none of paused runs."""
    rows = await session.execute(_QUEUED)
    return [QueuedRollout(row.rollout_id, row.runner_type, row.is_due) for row in rows]
