"""Gradings: leases of attempts that count once they are graded, fenced by `lease_id`, and their settled rewards.

    attempt to be graded ──lease_gradings──▶ leased ──settle_gradings──▶ settled: a total with its components
                                 ▲              ├──── no heartbeat ────┐
                                 ├──────────────┴── postpone_gradings ─┘ another try
                                 └───────────────── release_gradings: the same try

An attempt that was leased `SUSPECT_LEASES` times without a result may be what ends its graders: from then on a grader
has it beside no other such attempt. After `MAX_LEASES` times it is settled without a total when it is due again.
All times are the database's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import Any, NamedTuple

from sqlalchemy import TextClause, insert, text

from leyden.libs.contracts.config import BrokenDocument, Reward, stored_object, stored_reward
from leyden.libs.contracts.ledger import JudgeUse, NewComponent
from leyden.libs.faults import fault_point
from leyden.libs.store import tables
from leyden.libs.store.attempts import AttemptKey
from leyden.libs.store.database import ReadSession, Session
from leyden.libs.store.records.deliveries import RECEIVED
from leyden.libs.store.runs.feedback import AWAITS_FEEDBACK, feedback_of

MAX_OUTPUT = 1_000_000
"""Characters of an output that a lease carries, from its end."""
SUSPECT_LEASES = 3
"""Leases of an attempt without a result, after which it may be what ends its graders.

A grader that dies takes a try from every attempt that it grades. So many, because a store that is away ends leases,
too, and suspect attempts are graded one after the other. The third lease settles an attempt whose component failed, so
that one which is leased a fourth time has lost a grader.
"""
MAX_LEASES = 10
"""Leases of an attempt, after which its grading fails: it ends its graders."""
_GRADERS_DIED = f"its grader died {MAX_LEASES} times while it graded, or lost the store"

# Columns over the attempt `leased`.
OF_CALLS = f"""
           (SELECT count(*) FROM model_calls m
            WHERE m.run_id = leased.run_id AND m.rollout_id = leased.rollout_id AND m.attempt = leased.attempt
            AND m.choice = 0 AND m.status = 'completed' AND {RECEIVED}) AS calls,
           ARRAY(SELECT tool #>> '{{}}' FROM model_calls m
                 CROSS JOIN LATERAL jsonb_path_query(m.answer, '$.tool_calls[*].name')
                     WITH ORDINALITY AS of (tool, place)
                 WHERE m.run_id = leased.run_id AND m.rollout_id = leased.rollout_id AND m.attempt = leased.attempt
                 AND m.status = 'completed' AND {RECEIVED}
                 ORDER BY m.sequence, m.choice, of.place) AS tools
"""  # noqa: S608  # constants alone


class Lane(StrEnum):
    """The slowest grader of a run whose attempts are graded one by one: lanes do not wait for each other."""

    INSTANT = "instant"
    JUDGE = "judge"
    CODE = "code"
    CONTAINER = "container"


_LANE = f"""CASE WHEN u.contained THEN '{Lane.CONTAINER}' WHEN u.coded THEN '{Lane.CODE}'
             WHEN u.judged THEN '{Lane.JUDGE}' ELSE '{Lane.INSTANT}' END"""

# Over run u: its judges have used all tokens, or all money, that they may.
BUDGET_SPENT = """EXISTS (SELECT FROM judge_usage j
            WHERE j.run_id = u.id AND (j.tokens >= u.judge_tokens OR j.cost >= u.judge_cost))"""

# Over rollouts r and their runs u: those that a grader may take.
_DUE = f"""
        SELECT r.id, r.grading_attempt AS attempt, r.run_id
        FROM {{source}}
        JOIN runs u ON u.id = r.run_id
        JOIN attempts a ON a.rollout_id = r.id AND a.number = r.grading_attempt
        LEFT JOIN gradings g ON g.rollout_id = r.id AND g.attempt = r.grading_attempt
        WHERE r.state = 'queued' AND r.grading_attempt > r.excused_attempt AND NOT {AWAITS_FEEDBACK}
        AND NOT {BUDGET_SPENT}
        AND (g.rollout_id IS NULL OR g.settled_at IS NULL AND g.lease_expires_at <= clock_timestamp())
"""  # noqa: S608  # constants alone

# Over group h of run u: the group has a rollout that runs, waits for feedback, or is leased.
_IS_INCOMPLETE = f"""EXISTS (
    SELECT FROM rollouts s
    LEFT JOIN attempts a ON a.rollout_id = s.id AND a.number = s.grading_attempt AND a.number > s.excused_attempt
    LEFT JOIN gradings g ON g.rollout_id = s.id AND g.attempt = a.number
    WHERE s.group_id = h.id AND s.state = 'queued' AND (
        a.number IS NULL OR {AWAITS_FEEDBACK} OR g.settled_at IS NULL AND g.lease_expires_at > clock_timestamp()))"""


def _in_turn(kind: str) -> str:
    """SQL: the place of a row, rollout r or group h, in the line of its run: after those that graders have.

    Ordered by it, runs take turns, and the run with the fewest at graders is next.
    """
    return f"""count(*) FILTER (WHERE held.is_leased) OVER (PARTITION BY {kind}.run_id) + row_number() OVER (
            PARTITION BY {kind}.run_id, held.is_leased ORDER BY {kind}.created_at, {kind}.id)"""


_IS_SUSPECT = f"g.settled_at IS NULL AND g.tries >= {SUSPECT_LEASES}"

# Over group h: one of its attempts is suspect.
_HAS_SUSPECT = f"""EXISTS (
    SELECT FROM rollouts s JOIN gradings g ON g.rollout_id = s.id AND g.attempt = s.grading_attempt
    WHERE s.group_id = h.id AND s.state = 'queued' AND {_IS_SUSPECT})"""


# Why one pass over all that wait: a look at each run took 500 ms with 300 runs and 10,000 rollouts; this takes 60.
_SINGLE = f"""
        SELECT r.id, r.grading_attempt AS attempt, r.run_id FROM (
            SELECT r.id, r.created_at, held.is_leased, {_in_turn("r")} AS turn
            FROM rollouts r
            JOIN runs u ON u.id = r.run_id
            JOIN attempts a ON a.rollout_id = r.id AND a.number = r.grading_attempt
            LEFT JOIN gradings g ON g.rollout_id = r.id AND g.attempt = r.grading_attempt
            CROSS JOIN LATERAL (SELECT coalesce(g.lease_expires_at > clock_timestamp(), false) AS is_leased) AS held
            WHERE r.state = 'queued' AND r.grading_attempt > r.excused_attempt AND g.settled_at IS NULL
            AND NOT {AWAITS_FEEDBACK} AND NOT {BUDGET_SPENT} AND {_LANE} = :lane AND NOT u.compared
            AND (held.is_leased OR coalesce(g.tries, 0) < {SUSPECT_LEASES})
        ) AS fair JOIN rollouts r ON r.id = fair.id
        WHERE NOT fair.is_leased
        ORDER BY fair.turn, fair.created_at, fair.id LIMIT :count
        FOR NO KEY UPDATE OF r SKIP LOCKED
"""  # noqa: S608  # constants alone

_SUSPECTS = (
    _DUE.format(source="rollouts r")
    + f"""
        AND {_IS_SUSPECT} AND NOT u.compared
        ORDER BY g.tries, r.created_at, r.id LIMIT :count
        FOR NO KEY UPDATE OF r SKIP LOCKED
"""
)


def _of_groups(suspicion: str) -> str:
    """SQL: the attempts of groups h that are graded whole. Args: suspicion: the condition of such a group"""
    chosen = f"""
            SELECT fair.id FROM (
                SELECT h.id, h.created_at, held.is_leased, {_in_turn("h")} AS turn
                FROM groups h
                JOIN runs u ON u.id = h.run_id AND u.compared
                CROSS JOIN LATERAL (SELECT EXISTS (
                    SELECT FROM rollouts s JOIN gradings d ON d.rollout_id = s.id AND d.attempt = s.grading_attempt
                    WHERE s.group_id = h.id AND d.settled_at IS NULL AND d.lease_expires_at > clock_timestamp()
                ) AS is_leased) AS held
                WHERE h.state = 'open' AND NOT {BUDGET_SPENT} AND (
                    held.is_leased OR {suspicion} AND NOT {_IS_INCOMPLETE}) AND EXISTS (
                    SELECT FROM rollouts s
                    LEFT JOIN gradings d ON d.rollout_id = s.id AND d.attempt = s.grading_attempt
                    WHERE s.group_id = h.id AND s.state = 'queued' AND d.settled_at IS NULL)
            ) AS fair
            WHERE NOT fair.is_leased
            ORDER BY fair.turn, fair.created_at, fair.id LIMIT :count
    """  # noqa: S608  # constants alone
    # All rollouts of a group are locked, in the order of their ids: another grader waits, and then finds all leased.
    return (
        _DUE.format(source=f"({chosen}) AS chosen JOIN rollouts r ON r.group_id = chosen.id")
        + """
        ORDER BY r.id
        FOR NO KEY UPDATE OF r
"""
    )


def _leasing(due: str) -> TextClause:
    # The condition of the conflict decides between two graders: a lease that the other one has taken stays.
    return text(f"""
    WITH due AS ({due}), leased AS (
        INSERT INTO gradings AS g (rollout_id, attempt, run_id, tries, lease_id, owner, lease_expires_at)
        SELECT id, attempt, run_id, 1, replace(gen_random_uuid()::text, '-', ''), :owner,
               clock_timestamp() + make_interval(secs => :seconds)
        FROM due ORDER BY id
        ON CONFLICT (rollout_id, attempt) DO UPDATE SET
            tries = g.tries + 1, lease_id = excluded.lease_id, owner = excluded.owner,
            lease_expires_at = excluded.lease_expires_at
        WHERE g.settled_at IS NULL AND g.lease_expires_at <= clock_timestamp()
        RETURNING *
    )
    SELECT leased.rollout_id, leased.attempt, leased.run_id, r.group_id, leased.lease_id, leased.tries,
           u.config, t.payload AS task, right(o.stdout_tail, :max_output) AS output,
           o.reward AS line_reward,
           {OF_CALLS}
    FROM leased
    JOIN rollouts r ON r.id = leased.rollout_id
    JOIN groups g ON g.id = r.group_id
    JOIN runs u ON u.id = leased.run_id
    JOIN tasks t ON t.dataset_id = g.dataset_id AND t.number = g.task_number
    JOIN outcomes o ON o.rollout_id = leased.rollout_id AND o.attempt = leased.attempt
    ORDER BY g.created_at, r.group_id, r.created_at, r.id
    """)  # noqa: S608  # constants alone


_LEASE_SINGLE = _leasing(_SINGLE)
_LEASE_GROUPS = _leasing(_of_groups(f"NOT {_HAS_SUSPECT}"))
_LEASE_SUSPECTS = _leasing(_SUSPECTS)
_LEASE_SUSPECT_GROUPS = _leasing(_of_groups(_HAS_SUSPECT))

_HEARTBEAT = text("""
    UPDATE gradings SET lease_expires_at = clock_timestamp() + make_interval(secs => :seconds)
    WHERE lease_id = ANY(:lease_ids) AND settled_at IS NULL
    RETURNING lease_id
""")

_RELEASE = text("""
    UPDATE gradings SET tries = tries - 1, lease_expires_at = clock_timestamp()
    WHERE lease_id = ANY(:lease_ids) AND settled_at IS NULL AND lease_expires_at > clock_timestamp()
""")

# Every writer of several gradings locks them in the order of their keys, which prevents deadlocks.
_LOCK = text("""
    SELECT FROM gradings WHERE lease_id = ANY(:lease_ids) ORDER BY rollout_id, attempt FOR NO KEY UPDATE
""")

_SETTLE = text("""
    UPDATE gradings g SET settled_at = clock_timestamp(), total = v.total, reason = v.reason
    FROM unnest(CAST(:lease_ids AS text[]), CAST(:totals AS double precision[]), CAST(:reasons AS text[]))
        AS v (lease_id, total, reason)
    WHERE g.lease_id = v.lease_id AND g.settled_at IS NULL
    RETURNING g.lease_id
""")


_USE = text("""
    INSERT INTO judge_usage AS j (run_id, tokens, cost, unpriced_tokens)
    SELECT id, :tokens, :cost, :unpriced_tokens FROM runs WHERE id = :run
    ON CONFLICT (run_id) DO UPDATE SET tokens = j.tokens + excluded.tokens, cost = j.cost + excluded.cost,
        unpriced_tokens = j.unpriced_tokens + excluded.unpriced_tokens
""")


async def add_judge_use(session: Session, run_id: str, use: JudgeUse) -> None:
    """Counts what a run's judges have used; a deleted run has used nothing. A repeat counts it again."""
    await session.execute(_USE, {"run": run_id, **use._asdict()})


class JudgeBudget(NamedTuple):
    """The budget of a run's judges. Args: is_spent: they may use no more; has_cap: `reward.judge_cost` bounds them"""

    is_spent: bool
    has_cap: bool


_BUDGET = text(f"SELECT {BUDGET_SPENT} AS is_spent, u.judge_cost IS NOT NULL AS has_cap FROM runs u WHERE u.id = :run")  # noqa: S608  # constants alone


async def judge_budget(session: ReadSession, run_id: str) -> JudgeBudget:
    """Returns whether a run's judges may be asked; those of a deleted run may."""
    row = (await session.execute(_BUDGET, {"run": run_id})).one_or_none()
    return JudgeBudget(False, False) if row is None else JudgeBudget(*row)


@dataclass(frozen=True)
class GradingLease:
    """The right to grade one attempt, with what graders read. `tries` counts its leases, this one included, and none
    that was released."""

    rollout_id: str
    attempt: int
    run_id: str
    group_id: str
    lease_id: str
    tries: int
    reward: Reward
    task: dict[str, Any]
    output: str
    line_reward: float | None
    calls: int
    tools: tuple[str, ...]
    feedback: Mapping[str, Sequence[float]]
    """Values by component, in the order in which they came."""


@dataclass(frozen=True)
class Settled:
    """The end of a grading: a total, or the reason why there is none, with all components in their order."""

    lease: GradingLease
    total: float | None
    reason: str | None
    components: tuple[NewComponent, ...]


async def lease_gradings(
    session: Session, owner: str, count: int, seconds: float, *, lane: Lane = Lane.INSTANT
) -> list[GradingLease]:
    """Leases attempts that wait for grades, by turns of the runs, and of a run those of the oldest rollouts first.
    The run with the fewest attempts at graders is next, so that a run with many of them holds up no other one.

    Safe to repeat, and for several graders at once: each attempt has one live lease. An attempt whose run's document
    does not parse gets no lease: its grading ends with that reason, and the others go on. Suspect ones are those of
    `lease_suspects`.

    Args: lane: of the runs of this lane; none of a run with a judge that compares
    """
    return await _lease(session, _LEASE_SINGLE, owner, count, seconds, lane=lane)


async def lease_groups(session: Session, owner: str, count: int, seconds: float) -> list[list[GradingLease]]:
    """Leases all attempts of groups whose rollouts a judge compares, once all of them have ended; by turns of the runs,
    as `lease_gradings`, and of a run the oldest first.

    Args: count: of groups
    """
    return _by_group(await _lease(session, _LEASE_GROUPS, owner, count, seconds))


async def lease_suspects(session: Session, owner: str, count: int, seconds: float) -> list[list[GradingLease]]:
    """Leases attempts that had `SUSPECT_LEASES` leases without a result, the fewest leases first: attempts that lost
    graders to a deadly one are graded before it ends another grader. Groups that a judge compares come after them.

    A grader that has one of them at a time takes no try from another one when it dies. One whose graders have died
    `MAX_LEASES` times gets no lease: its grading ends with that reason.

    Args: count: of attempts and groups
    """
    leased = [[one] for one in await _lease(session, _LEASE_SUSPECTS, owner, count, seconds)]
    if len(leased) < count:
        leased += _by_group(await _lease(session, _LEASE_SUSPECT_GROUPS, owner, count - len(leased), seconds))
    return leased


def _by_group(leased: Sequence[GradingLease]) -> list[list[GradingLease]]:
    return [list(siblings) for _, siblings in groupby(leased, lambda one: one.group_id)]


async def _lease(
    session: Session, statement: TextClause, owner: str, count: int, seconds: float, **names: str
) -> list[GradingLease]:
    values = {"owner": owner, "count": count, "seconds": seconds, "max_output": MAX_OUTPUT, **names}
    rows = (await session.execute(statement, values)).all()
    # A statement of its own: what was accepted while the first one looked for attempts is not in that one's snapshot.
    feedback = await feedback_of(session, [AttemptKey(row.rollout_id, row.attempt) for row in rows])
    leased, broken = [], {}
    for row in rows:
        if row.tries > MAX_LEASES:
            broken[row.lease_id] = _GRADERS_DIED
            continue
        try:
            reward = stored_reward(stored_object(row.config).get("reward"))
        except BrokenDocument as error:
            broken[row.lease_id] = str(error)
        else:
            leased.append(_lease_of(row, reward, feedback.get(row.rollout_id, {})))
    await _settle(session, dict.fromkeys(broken), broken)
    return leased


def _lease_of(row: Any, reward: Reward, feedback: Mapping[str, Sequence[float]]) -> GradingLease:
    return GradingLease(
        rollout_id=row.rollout_id,
        attempt=row.attempt,
        run_id=row.run_id,
        group_id=row.group_id,
        lease_id=row.lease_id,
        tries=row.tries,
        reward=reward,
        task=row.task,
        output=row.output,
        line_reward=row.line_reward,
        calls=row.calls,
        tools=tuple(row.tools),
        feedback=feedback,
    )


async def heartbeat_gradings(session: Session, lease_ids: Iterable[str], seconds: float) -> set[str]:
    """Renews leases; returns the ids of the renewed ones. The others were lost."""
    names = {"lease_ids": list(lease_ids), "seconds": seconds}
    return set(await session.scalars(_HEARTBEAT, names)) if names["lease_ids"] else set()


async def postpone_gradings(session: Session, lease_ids: Iterable[str], seconds: float) -> None:
    """Ends leases without a result: the attempts may be leased again after a pause."""
    await session.execute(_HEARTBEAT, {"lease_ids": list(lease_ids), "seconds": seconds})


async def release_gradings(session: Session, lease_ids: Sequence[str]) -> None:
    """Ends the leases of a grader that stops in good order, which count as no tries. A repeat changes nothing."""
    await session.execute(_LOCK, {"lease_ids": lease_ids})
    await session.execute(_RELEASE, {"lease_ids": lease_ids})


async def settle_gradings(session: Session, settled: Sequence[Settled]) -> set[str]:
    """Writes totals and components; returns the ids of the leases that were live. The others change nothing.

    Idempotency key: the lease id. A repeat after success finds no unsettled grading and writes no second row.
    """
    by_id = {one.lease.lease_id: one for one in settled}
    await session.execute(_LOCK, {"lease_ids": list(by_id)})
    totals = {lease_id: one.total for lease_id, one in by_id.items()}
    live = await _settle(session, totals, {lease_id: one.reason for lease_id, one in by_id.items()})
    fault_point("grader.total_written")
    graded = [one for lease_id, one in by_id.items() if lease_id in live]
    rows = [row for one in graded for row in rows_of(_keys(one.lease), one.components)]
    if rows:
        await session.execute(insert(tables.RolloutReward), rows)
    return live


async def _settle(session: Session, totals: Mapping[str, float | None], reasons: Mapping[str, str | None]) -> set[str]:
    """Ends gradings by lease with a total, or with the reason for which there is none; returns the live ones."""
    if not totals:
        return set()
    columns = {"lease_ids": list(totals), "totals": list(totals.values()), "reasons": list(reasons.values())}
    return set(await session.scalars(_SETTLE, columns))


def _keys(lease: GradingLease) -> dict[str, Any]:
    return {"rollout_id": lease.rollout_id, "attempt": lease.attempt, "run_id": lease.run_id}


def rows_of(keys: Mapping[str, Any], components: Sequence[NewComponent]) -> list[dict[str, Any]]:
    """Returns rows of `rollout_rewards`, in the order of the components. Args: keys: of the attempt"""
    return [{**keys, "position": position, **one._asdict()} for position, one in enumerate(components)]
