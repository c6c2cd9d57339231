"""The reward of agents' own failures where the run's document names none: no failure earns more than other attempts.

With all that was given to the rollout and its calls it is the smallest reward that an attempt of the run has earned
without a failure, those of its own group included, and at most 0; where more was taken than given it is that much less.
The store decides in the transaction that completes the group, and writes it on the rollout once. Failures of
evaluations have the smallest reward at the time of the question (`store.rewards`): a number that falls while the run
learns would make later versions look worse.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import text

from leyden.libs.store.database import Session
from leyden.libs.store.rewards import GIVEN, REWARD

# One row a run holds the smallest reward so far, so that the cost of a decision does not grow with the run.
_SMALLEST = text(f"""
    UPDATE run_status s SET smallest_reward = least(s.smallest_reward, found.smallest)
    FROM (
        SELECT rollouts.run_id, min({REWARD}) AS smallest FROM rollouts
        WHERE rollouts.group_id = ANY(:groups) AND rollouts.state = 'finished' AND rollouts.reason = 'succeeded'
        GROUP BY rollouts.run_id
    ) AS found
    WHERE s.run_id = found.run_id
""")  # noqa: S608  # constants alone

_DECIDE = text(f"""
    UPDATE rollouts r SET reward = least(0, s.smallest_reward) - greatest(0, (
        SELECT {GIVEN} FROM rollouts WHERE rollouts.id = r.id))
    FROM run_status s, groups g
    WHERE r.group_id = ANY(:groups) AND r.state = 'finished' AND r.reward IS NULL AND s.run_id = r.run_id
    AND g.id = r.group_id AND g.evaluation_id IS NULL
""")  # noqa: S608  # constants alone

_LATE = text("""
    SELECT DISTINCT r.group_id FROM run_status s
    JOIN rollouts r ON r.run_id = s.run_id AND r.state = 'finished' AND r.reward IS NULL
    JOIN groups g ON g.id = r.group_id AND g.state = 'complete' AND g.evaluation_id IS NULL
    WHERE s.phase NOT IN ('completed', 'failed', 'cancelled')
""")


async def decide_late(session: Session) -> None:
    """Rewards the failures of groups that a controller of an earlier version completed, in runs that are not over."""
    await decide(session, list(await session.scalars(_LATE)))


async def decide(session: Session, groups: Sequence[str]) -> None:
    """Rewards the failures of groups that this transaction completes. A repeat changes nothing: only failures without a
    reward get one."""
    await session.execute(_SMALLEST, {"groups": list(groups)})
    await session.execute(_DECIDE, {"groups": list(groups)})
