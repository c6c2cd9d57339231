"""Trials: stored attempts that somebody grades with other components. The grader alone asks judges and runs code.

    asked ──lease_trials──▶ leased ──answer_trial──▶ answered ──end_trial──▶ gone
                ▲              │
                └─ no heartbeat, release_trials

The API asks, waits and ends; a trial whose API has died goes with its time. A lease is fenced by its id: one whose
grader has died is another grader's, and the late answer of the first changes nothing. All times are the database's
clock.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from sqlalchemy import text

from leyden.libs.contracts.config import BrokenDocument, Reward, stored_reward
from leyden.libs.store.database import Database, ReadSession, Session

POLL_SECONDS = 0.2
MAX_TRIES = 3
"""Leases of a trial, after which it fails: it may be what ends its graders."""
_FAILED = "failed"
"""The member of an answer without a grade: its reason."""

_ASK = text("""
    INSERT INTO grading_trials (id, rollout_id, reward, against, expires_at)
    VALUES (:id, :rollout, CAST(:reward AS jsonb), :against, clock_timestamp() + make_interval(secs => :seconds))
""")
_EXPIRED = text("DELETE FROM grading_trials WHERE expires_at <= clock_timestamp()")
_LEASE = text("""
    UPDATE grading_trials SET tries = tries + 1,
        lease_id = replace(gen_random_uuid()::text, '-', ''),
        lease_expires_at = clock_timestamp() + make_interval(secs => :seconds)
    WHERE id IN (SELECT id FROM grading_trials WHERE answer IS NULL AND expires_at > clock_timestamp()
                 AND coalesce(lease_expires_at <= clock_timestamp(), true)
                 ORDER BY expires_at LIMIT :count FOR UPDATE SKIP LOCKED)
    RETURNING id, rollout_id, reward, against, lease_id, tries,
        extract(epoch FROM expires_at - clock_timestamp())::float8 AS seconds
""")
_RENEW = text("""
    UPDATE grading_trials SET lease_expires_at = clock_timestamp() + make_interval(secs => :seconds)
    WHERE lease_id = ANY(:leases) AND answer IS NULL RETURNING lease_id
""")
_RELEASE = text("""
    UPDATE grading_trials SET tries = tries - 1, lease_expires_at = clock_timestamp()
    WHERE lease_id = ANY(:leases) AND answer IS NULL AND lease_expires_at > clock_timestamp()
""")
_ANSWER = text("""
    UPDATE grading_trials SET answer = CAST(:answer AS jsonb) WHERE lease_id = :lease AND answer IS NULL
""")
_STATE = text("""
    SELECT lease_id, answer, EXISTS (
        SELECT FROM grading_trials WHERE answer IS NULL AND lease_expires_at > clock_timestamp()) AS graders_work
    FROM grading_trials WHERE id = :id
""")
_END = text("DELETE FROM grading_trials WHERE id = :id")


class Trial(NamedTuple):
    """A stored attempt of a rollout, and the components with which it is graded within so many seconds. `against`: the
    rollout with which judges compare it."""

    id: str
    lease_id: str
    rollout_id: str
    reward: Reward
    seconds: float
    against: str | None = None


class TrialState(NamedTuple):
    """The lease of the trial's last grader, its answer, and whether graders work on any trial."""

    lease_id: str | None
    answer: dict[str, Any] | None
    graders_work: bool


async def ask_trial(
    session: Session, rollout_id: str, reward: Reward, seconds: float, against: str | None = None
) -> str:
    """Returns the id of a new trial, for which no grader may begin after so many seconds."""
    trial = secrets.token_hex(16)
    asked = {"rollout": rollout_id, "reward": reward.model_dump_json(), "against": against}
    values = {"id": trial, "seconds": seconds, **asked}
    await session.execute(_ASK, values)
    return trial


async def lease_trials(session: Session, count: int, lease_seconds: float) -> list[Trial]:
    """Gives trials to a grader, which renews their leases, and removes those whose time is over.

    One that does not parse fails, and so does one whose graders have died `MAX_TRIES` times.
    """
    await session.execute(_EXPIRED)
    rows: Sequence[Any] = (await session.execute(_LEASE, {"count": count, "seconds": lease_seconds})).all()
    trials = []
    for row in rows:
        if row.tries > MAX_TRIES:
            await fail_trial(session, row.lease_id, f"its grader died {MAX_TRIES} times while it graded")
            continue
        try:
            reward = stored_reward(row.reward)
        except BrokenDocument as error:
            await fail_trial(session, row.lease_id, str(error))
        else:
            trials.append(Trial(row.id, row.lease_id, row.rollout_id, reward, row.seconds, row.against))
    return trials


async def renew_trials(session: Session, leases: Iterable[str], lease_seconds: float) -> set[str]:
    """Renews leases by their ids; returns the renewed ones. The others were lost, or have ended."""
    return set(await session.scalars(_RENEW, {"leases": list(leases), "seconds": lease_seconds}))


async def release_trials(session: Session, leases: Iterable[str]) -> None:
    """Ends leases without an answer, which count as no tries: another grader may take the trials at once."""
    await session.execute(_RELEASE, {"leases": list(leases)})


async def answer_trial(session: Session, lease: str, answer: dict[str, Any]) -> None:
    """Writes the answer of the lease of this id; a second one, and that of a lost lease, change nothing."""
    await session.execute(_ANSWER, {"lease": lease, "answer": json.dumps(answer)})


async def fail_trial(session: Session, lease: str, reason: str) -> None:
    """Answers that nothing could be graded."""
    await answer_trial(session, lease, {_FAILED: reason})


async def trial_state(session: ReadSession, trial: str) -> TrialState | None:
    """Returns None once it has ended."""
    row = (await session.execute(_STATE, {"id": trial})).one_or_none()
    return None if row is None else TrialState(row.lease_id, row.answer, row.graders_work)


async def end_trial(session: Session, trial: str) -> None:
    """Removes it."""
    await session.execute(_END, {"id": trial})


class NoGrader(TimeoutError):
    """No grader has begun, or none has answered, in time."""


class TrialFailed(RuntimeError):
    """The grader has begun and could not grade; the message has its reason."""


async def graded_by_trial(
    database: Database,
    rollout_id: str,
    reward: Reward,
    *,
    begin_seconds: float,
    seconds: float,
    against: str | None = None,
) -> dict[str, Any]:
    """Returns a grader's answer to a trial.

    Args: begin_seconds: the longest wait for a grader while none works; seconds: for its answer; against: the rollout
        with which judges compare it
    Raises: NoGrader, TrialFailed
    """
    async with database.session() as session:
        trial = await ask_trial(session, rollout_id, reward, seconds, against)
    try:
        seen, ends, has_begun = time.monotonic(), time.monotonic() + seconds, False
        while time.monotonic() < ends:
            async with database.read() as session:
                found = await trial_state(session, trial)
            if found is not None and found.answer is not None:
                if _FAILED in found.answer:
                    raise TrialFailed(f"the grader could not grade rollout {rollout_id}: {found.answer[_FAILED]}")
                return found.answer
            has_begun = found is not None and found.lease_id is not None
            if has_begun or (found is not None and found.graders_work):
                seen = time.monotonic()
            elif time.monotonic() > seen + begin_seconds:
                raise NoGrader(f"no grader has begun within {begin_seconds:g} s: does the service grader run?")
            await asyncio.sleep(POLL_SECONDS)
        if not has_begun:
            raise NoGrader(f"all graders were busy for {seconds:g} s: ask later, or run more of the service grader")
        raise NoGrader(f"no grader has answered within {seconds:g} s: lower the timeouts of reward.components")
    finally:
        async with database.session() as session:
            await end_trial(session, trial)
