"""Rules about rewards: gradings, components, and the reward of failures."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from sqlalchemy import Row, text

from leyden.libs.contracts.alarms import ALARM_RULES, Finding
from leyden.libs.store.database import ReadSession
from leyden.libs.store.runs.feedback import AWAITS_FEEDBACK, READY_AT
from leyden.libs.store.runs.grading import BUDGET_SPENT

_WAITING = text(f"""
    SELECT count(*) AS attempts,
           coalesce(extract(epoch FROM max(clock_timestamp() - greatest({READY_AT}, (
               SELECT max(o.created_at) FROM rollouts s JOIN outcomes o ON o.rollout_id = s.id
               WHERE u.compared AND s.group_id = h.id)))), 0)::double precision AS seconds
    FROM rollouts r
    JOIN groups h ON h.id = r.group_id
    JOIN runs u ON u.id = r.run_id
    JOIN attempts a ON a.rollout_id = r.id AND a.number = r.grading_attempt
    WHERE r.run_id = :run AND r.state = 'queued' AND r.grading_attempt > r.excused_attempt AND NOT {AWAITS_FEEDBACK}
    AND NOT (u.compared AND EXISTS (
        SELECT FROM rollouts s WHERE s.group_id = h.id AND s.state = 'queued' AND (
            s.grading_attempt IS NULL OR s.grading_attempt <= s.excused_attempt)))
""")  # noqa: S608  # constants alone

_SPENT = text(f"""
    SELECT used.tokens, u.judge_tokens, used.cost, u.judge_cost
    FROM runs u JOIN judge_usage used ON used.run_id = u.id
    WHERE u.id = :run AND {BUDGET_SPENT}
""")  # noqa: S608  # constants alone

_WITHOUT_TOTAL = text("""
    SELECT count(*) AS attempts, (array_agg(reason ORDER BY settled_at DESC))[1] AS reason
    FROM (SELECT * FROM gradings WHERE run_id = :run AND settled_at IS NOT NULL
          ORDER BY settled_at DESC LIMIT :newest) newest
    -- An evaluation's rollout gets its reward by a later grading, too.
    WHERE total IS NULL AND NOT EXISTS (
        SELECT FROM regrades JOIN rollouts ON rollouts.id = regrades.rollout_id JOIN groups ON groups.id = group_id
        WHERE regrades.rollout_id = newest.rollout_id AND regrades.attempt = newest.attempt
            AND groups.evaluation_id IS NOT NULL)
""")

_FAILING = text("""
    SELECT w.component, count(*) AS attempts, count(*) FILTER (WHERE w.state = 'failed') AS failed,
           (array_agg(w.explanation ORDER BY newest.settled_at DESC) FILTER (WHERE w.state = 'failed'))[1] AS cause
    FROM (SELECT rollout_id, attempt, settled_at FROM gradings WHERE run_id = :run AND settled_at IS NOT NULL
          ORDER BY settled_at DESC LIMIT :newest) newest
    JOIN rollout_rewards w ON w.rollout_id = newest.rollout_id AND w.attempt = newest.attempt AND w.revision = 1
    GROUP BY w.component HAVING count(*) FILTER (WHERE w.state = 'failed') > :share * count(*)
    ORDER BY min(w.position)
""")

_TOO_HIGH = text("""
    SELECT r.failure_reward AS given, s.smallest_reward AS smallest
    FROM runs r JOIN run_status s ON s.run_id = r.id
    WHERE r.id = :run AND r.failure_reward > s.smallest_reward
""")


async def of_rewards(session: ReadSession, run_id: str) -> AsyncIterator[Finding]:
    """The rules about rewards that hold."""
    scope = {"run": run_id}
    high = (await session.execute(_TOO_HIGH, scope)).one_or_none()
    if high is not None:
        yield Finding(
            "failure_reward",
            f"sampling.failure_reward {high.given:g} is above the smallest reward of the run so far"
            f" ({high.smallest:g}), so that crashes are worth learning",
            {"failure_reward": high.given, "smallest_reward": high.smallest},
            f"cancel the run and continue it with null (the smallest so far, at most 0), or at most {high.smallest:g}",
        )
    waiting = (await session.execute(_WAITING, scope)).one()
    spent = (await session.execute(_SPENT, scope)).one_or_none()
    if spent is not None and waiting.attempts:
        yield Finding(
            "judge_budget",
            f"the run's judges have {_spent(spent)}, and {waiting.attempts} attempts wait for their grades",
            {
                "tokens": spent.tokens,
                "cost": spent.cost,
                "attempts": waiting.attempts,
                **({} if spent.judge_tokens is None else {"judge_tokens": spent.judge_tokens}),
                **({} if spent.judge_cost is None else {"judge_cost": spent.judge_cost}),
            },
        )
    elif waiting.seconds > ALARM_RULES["grades_wait"].limit:
        yield Finding(
            "grades_wait",
            f"{waiting.attempts} attempts wait for their grades, the longest for {waiting.seconds:.0f} s",
            {"attempts": waiting.attempts, "seconds": waiting.seconds},
        )
    lost = (await session.execute(_WITHOUT_TOTAL, {**scope, "newest": ALARM_RULES["ungraded"].window})).one()
    if lost.attempts:
        reason = f"{lost.attempts} attempts have no reward and were excluded; the last: {lost.reason}"
        yield Finding("ungraded", reason, {"attempts": lost.attempts})
    rule = ALARM_RULES["component_fails"]
    limits = {**scope, "newest": rule.window, "share": rule.limit}
    for row in await session.execute(_FAILING, limits):
        share = row.failed / row.attempts
        yield Finding(
            rule.name,
            f"component {row.component} failed in {row.failed} of the last {row.attempts} attempts ({share:.0%}), and"
            f" reward.missing decided what they earn; the last: {row.cause}",
            {"failed": row.failed, "attempts": row.attempts, "share": share},
            subject=row.component,
        )


def _spent(spent: Row[Any]) -> str:
    if spent.judge_tokens is not None and spent.tokens >= spent.judge_tokens:
        return f"used {spent.tokens} of {spent.judge_tokens} tokens (reward.judge_tokens)"
    return f"cost {spent.cost:.4g} of {spent.judge_cost:.4g} (reward.judge_cost)"
