"""The facts of one stored attempt, as graders see them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import text

from leyden.libs.grading.facts import MAX_TEXT, AttemptFacts
from leyden.libs.store.attempts import AttemptKey
from leyden.libs.store.database import ReadSession
from leyden.libs.store.read.views import UnknownRollout
from leyden.libs.store.runs.feedback import feedback_of
from leyden.libs.store.runs.grading import OF_CALLS

_FACTS = text(f"""
    SELECT leased.attempt, leased.line_reward, right(leased.stdout_tail, :most) AS output, t.payload AS task,
           to_regclass(format('%I', 'model_calls__' || leased.run_id)) IS NULL AS pruned, {OF_CALLS}
    FROM (SELECT r.run_id, r.group_id, o.rollout_id, o.attempt, o.reward AS line_reward, o.stdout_tail
          FROM rollouts r JOIN outcomes o ON o.rollout_id = r.id WHERE r.id = :rollout
          ORDER BY o.attempt = coalesce(r.attempt, r.grading_attempt) DESC NULLS LAST, o.attempt DESC LIMIT 1) AS leased
    JOIN groups g ON g.id = leased.group_id
    JOIN tasks t ON t.dataset_id = g.dataset_id AND t.number = g.task_number
""")  # noqa: S608  # constants alone


class RunPruned(RuntimeError):
    """The run's outputs and model calls are gone: graders would take them for empty."""


async def attempt_facts(session: ReadSession, rollout_id: str) -> tuple[int, AttemptFacts]:
    """Returns the attempt that counts, or else the last one that ended, with its facts.

    Raises: UnknownRollout: there is no such rollout, or none of its attempts has ended; RunPruned
    """
    row = (await session.execute(_FACTS, {"rollout": rollout_id, "most": MAX_TEXT})).one_or_none()
    if row is None:
        raise UnknownRollout(f"there is no rollout {rollout_id!r} with an attempt that has ended")
    if row.pruned:
        raise RunPruned(
            f"rollout {rollout_id} keeps its grades: its run was pruned, and the agent's output and calls are gone"
        )
    feedback = await feedback_of(session, [AttemptKey(rollout_id, row.attempt)])
    return row.attempt, AttemptFacts(
        task=row.task,
        output=row.output,
        line_reward=row.line_reward,
        calls=row.calls,
        tools=tuple(row.tools),
        feedback=feedback.get(rollout_id, {}),
    )


async def task_of_attempt(session: ReadSession, rollout_id: str) -> dict[str, Any]:
    """Returns the task of a rollout with an attempt that has ended.

    Raises: UnknownRollout; RunPruned
    """
    _, facts = await attempt_facts(session, rollout_id)
    return dict(facts.task)


_BESIDE = text("""
    SELECT s.id FROM rollouts r JOIN rollouts s ON s.group_id = r.group_id AND s.id <> r.id
    WHERE r.id = :rollout AND s.state = 'finished' AND s.reason = 'succeeded' AND s.rerolls_of IS NULL ORDER BY s.id
""")


async def facts_beside(session: ReadSession, rollout_id: str) -> list[AttemptFacts]:
    """Returns the facts of the group's other rollouts whose agents succeeded, in the order of their ids.

    Raises: RunPruned
    """
    others = (await session.scalars(_BESIDE, {"rollout": rollout_id})).all()
    return [(await attempt_facts(session, one))[1] for one in others]
