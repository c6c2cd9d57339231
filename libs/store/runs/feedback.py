"""Feedback: values that people and other programs give to components of a rollout's reward.

The first lease of a grading closes the door: it takes the rollout's row lock, under which a value is written or
refused, and the grader reads the values after it has the lock. So each accepted value counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import groupby

from sqlalchemy import select, text

from leyden.libs.contracts.api.rollouts import Feedback, FeedbackRequest
from leyden.libs.contracts.states import AttemptState, OutcomeKind, RolloutState, RunIntent
from leyden.libs.store import tables
from leyden.libs.store.attempts import AttemptKey
from leyden.libs.store.database import ReadSession, Session
from leyden.libs.store.read.views import UnknownRollout, shown_feedback

# Documents from before there was `values` have none.
_NEEDED = "coalesce(u.feedback_values, 1)"
# Over rollouts r, their runs u, and the attempts a that are to be graded.
_LACKS = f"""EXISTS (
    SELECT FROM jsonb_array_elements_text(u.feedback_components) AS c (name) WHERE {_NEEDED} > (
        SELECT count(*) FROM feedback f
        WHERE f.rollout_id = a.rollout_id AND f.attempt = a.number AND f.component = c.name))"""  # noqa: S608  # constants alone
_DEADLINE = "a.finished_at + make_interval(secs => u.feedback_seconds)"
AWAITS_FEEDBACK = f"({_LACKS} AND {_DEADLINE} > clock_timestamp())"
_LAST = "(SELECT max(f.created_at) FROM feedback f WHERE f.rollout_id = a.rollout_id AND f.attempt = a.number)"
READY_AT = f"(CASE WHEN {_LACKS} THEN {_DEADLINE} ELSE greatest(a.finished_at, {_LAST}) END)"
"""The moment from which a grader may take an attempt that awaits no feedback."""

_VALUES = text("""
    SELECT f.rollout_id, f.component, array_agg(f.value ORDER BY f.created_at, f.key) AS values
    FROM unnest(CAST(:rollouts AS text[]), CAST(:attempts AS integer[])) AS asked (rollout_id, attempt)
    JOIN feedback f ON f.rollout_id = asked.rollout_id AND f.attempt = asked.attempt
    GROUP BY f.rollout_id, f.component
""")

# Over the groups with a rollout that waits: their rollouts that are, or may yet be, handed to the graders.
_WAITING = text(f"""
    WITH waiting AS (
        SELECT DISTINCT r.run_id, r.group_id FROM rollouts r
        JOIN runs u ON u.id = r.run_id
        JOIN attempts a ON a.rollout_id = r.id AND a.number = r.grading_attempt
        WHERE r.state = 'queued' AND r.grading_attempt > r.excused_attempt AND {AWAITS_FEEDBACK}
    )
    SELECT w.run_id, c.name, count(*) AS rollouts, count(*) FILTER (WHERE {_NEEDED} <= (
        SELECT count(*) FROM feedback f
        WHERE f.rollout_id = r.id AND f.attempt = r.grading_attempt AND f.component = c.name)) AS given
    FROM waiting w
    JOIN runs u ON u.id = w.run_id
    JOIN rollouts r ON r.group_id = w.group_id AND (r.state = 'queued' OR r.grading_attempt > r.excused_attempt)
    CROSS JOIN LATERAL jsonb_array_elements_text(u.feedback_components) WITH ORDINALITY AS c (name, place)
    GROUP BY w.run_id, c.name, c.place ORDER BY w.run_id, c.place
""")  # noqa: S608  # constants alone


class UnknownComponent(ValueError):
    """The run's reward has no such component that is `from: feedback`."""


class FeedbackRefused(ValueError):
    """The value would count nowhere, or its key was used for another one."""


async def add_feedback(
    session: Session, rollout_id: str, request: FeedbackRequest, token_name: str | None = None
) -> tuple[Feedback, bool]:
    """Returns the value and whether it is new. The repeat key is rollout and `key`; a repeat changes nothing.

    Raises: UnknownRollout; UnknownComponent; FeedbackRefused
    """
    # The lock orders two senders of one key, and a sender and the grader.
    found = await session.scalar(
        select(tables.Rollout).where(tables.Rollout.id == rollout_id).with_for_update(key_share=True)
    )
    if found is None:
        raise UnknownRollout(rollout_id)
    run = await session.get_one(tables.Run, found.run_id)
    _check_component(run, request.component)
    existing = await session.get(tables.Feedback, (rollout_id, request.key))
    if existing is not None:
        if FeedbackRequest.model_validate(existing, from_attributes=True) != request:
            raise FeedbackRefused(f"key {request.key!r} was used for other feedback of this rollout: send a new key")
        newest = await _newest_attempt(session, rollout_id)
        if found.state == RolloutState.QUEUED and newest is not None and newest.number != existing.attempt:
            lost = f"was for attempt {existing.attempt}, which was lost, and another one runs"
            raise FeedbackRefused(f"key {request.key!r} {lost}: send a new key")
        return shown_feedback(existing), False
    if run.intent in (RunIntent.CANCELLED, RunIntent.DELETED):
        raise FeedbackRefused(f"run {run.id} is {run.intent}, so feedback for its rollouts counts nowhere")
    attempt = await _open_attempt(session, found)
    row = tables.Feedback(
        rollout_id=rollout_id, attempt=attempt, run_id=run.id, token_name=token_name, **request.model_dump()
    )
    session.add(row)
    await session.flush()
    await session.refresh(row)
    return shown_feedback(row), True


def _check_component(run: tables.Run, component: str) -> None:
    names = run.feedback_components or []
    if component not in names:
        remedy = f"write one of {', '.join(names)}" if names else "its reward names none that is from: feedback"
        raise UnknownComponent(f"run {run.id} has no feedback {component!r}: {remedy}")


async def _newest_attempt(session: ReadSession, rollout_id: str) -> tables.Attempt | None:
    table = tables.Attempt
    attempts = select(table).where(table.rollout_id == rollout_id).order_by(table.number.desc()).limit(1)
    found: tables.Attempt | None = await session.scalar(attempts)
    return found


async def _open_attempt(session: ReadSession, rollout: tables.Rollout) -> int:
    """Returns the attempt that feedback may still be for. Raises: FeedbackRefused"""
    refused = f"rollout {rollout.id} takes no feedback: "
    attempt = await _newest_attempt(session, rollout.id)
    if attempt is not None and await session.get(tables.Grading, (rollout.id, attempt.number)) is not None:
        raise FeedbackRefused(f"{refused}it is graded already; reward.wait says for how long it waits")
    if rollout.state != RolloutState.QUEUED:
        raise FeedbackRefused(f"{refused}it is {rollout.state} ({rollout.reason})")
    if attempt is None:
        raise FeedbackRefused(f"{refused}it has not begun")
    outcome = await session.get(tables.Outcome, (rollout.id, attempt.number))
    is_lost = attempt.state == AttemptState.EXPIRED or attempt.number <= rollout.excused_attempt
    if is_lost or (outcome is not None and outcome.kind != OutcomeKind.SUCCEEDED):
        ending = "lost" if outcome is None else outcome.kind
        raise FeedbackRefused(f"{refused}its attempt {attempt.number} does not count ({ending})")
    return attempt.number


async def feedback_of(session: ReadSession, attempts: Iterable[AttemptKey]) -> Mapping[str, dict[str, list[float]]]:
    """Returns the values of attempts by rollout and component, in the order in which they came."""
    asked = list(attempts)
    found = defaultdict[str, dict[str, list[float]]](dict)
    columns = {"rollouts": [one.rollout_id for one in asked], "attempts": [one.attempt for one in asked]}
    for row in await session.execute(_VALUES, columns):
        found[row.rollout_id][row.component] = row.values
    return found


async def waiting_reasons(session: ReadSession) -> dict[str, str]:
    """Returns the runs with rollouts that wait for feedback, with words for users."""
    rows = (await session.execute(_WAITING)).all()
    return {
        run_id: "; ".join(
            f"waiting for {one.name}: {one.given} of {one.rollouts} rollouts have it"
            for one in found
            if one.given < one.rollouts
        )
        for run_id, found in groupby(rows, lambda row: str(row.run_id))
    }
