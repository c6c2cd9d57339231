"""Regrades: later gradings of a rollout that was graded already, each a revision with its total and its components.

Revision 1 is the grading that the rollout ended with. It stays, and what trained on it keeps its numbers. One that gave
no total excluded the rollout: revision 2 has its first total, and no step trains on it. Readers of components and of
evaluations take the newest revision.
"""

from __future__ import annotations

from sqlalchemy import insert, select

from leyden.libs.contracts.api.rollouts import Regrade
from leyden.libs.contracts.config import Reward
from leyden.libs.contracts.ledger import Ledger
from leyden.libs.contracts.states import UNGRADED, ComponentState, RolloutState
from leyden.libs.store import tables
from leyden.libs.store.database import Session
from leyden.libs.store.read.views import UnknownRollout, shown_regrade
from leyden.libs.store.runs.grading import rows_of

"""The controller's reason of a rollout whose grading ended without a total."""


class RegradeRefused(ValueError):
    """The rollout was never graded, or the new grading has no total."""


async def add_regrade(
    session: Session, rollout_id: str, attempt: int, reward: Reward, found: Ledger, token_name: str
) -> tuple[Regrade, bool]:
    """Returns the newest revision and whether it is new. One with the same components as the newest changes nothing.

    Raises: UnknownRollout; RegradeRefused
    """
    run_id = await _lock_graded(session, rollout_id, attempt)
    total = _total_of(rollout_id, found)
    newest = await session.scalar(
        select(tables.Regrade)
        .where(tables.Regrade.rollout_id == rollout_id, tables.Regrade.attempt == attempt)
        .order_by(tables.Regrade.revision.desc())
        .limit(1)
    )
    document = reward.model_dump(mode="json")
    if newest is not None and newest.reward == document and newest.total == total:
        return shown_regrade(newest), False
    row = tables.Regrade(
        rollout_id=rollout_id,
        attempt=attempt,
        revision=newest.revision + 1 if newest else 2,
        run_id=run_id,
        reward=document,
        total=total,
        token_name=token_name,
    )
    session.add(row)
    await session.flush()
    keys = {"rollout_id": rollout_id, "attempt": attempt, "run_id": run_id, "revision": row.revision}
    await session.execute(insert(tables.RolloutReward), rows_of(keys, found.components))
    await session.refresh(row)
    return shown_regrade(row), True


async def _lock_graded(session: Session, rollout_id: str, attempt: int) -> str:
    """Returns the run of a rollout that was graded. The lock orders two senders, so that revisions have no gap.

    Raises: UnknownRollout; RegradeRefused: its grading did not decide about it, or has not yet
    """
    rollout = await session.scalar(
        select(tables.Rollout).where(tables.Rollout.id == rollout_id).with_for_update(key_share=True)
    )
    if rollout is None:
        raise UnknownRollout(rollout_id)
    grading = await session.get(tables.Grading, (rollout_id, attempt))
    has_total = rollout.state == RolloutState.FINISHED and grading is not None and grading.total is not None
    lacks_total = rollout.state == RolloutState.EXCLUDED and rollout.reason == UNGRADED and grading is not None
    if not has_total and not lacks_total:
        raise RegradeRefused(
            f"rollout {rollout_id} is {rollout.state} and has no reward of components: only those that were graded can"
            " be graded again; try components by POST /v1/rollouts/ROLLOUT/grades"
        )
    return rollout.run_id


def _total_of(rollout_id: str, found: Ledger) -> float:
    """The total of a grading in which nothing failed. Raises: RegradeRefused"""
    lost = [one for one in found.components if one.state == ComponentState.FAILED]
    if found.total is None or lost:
        cause = "; ".join(f"{one.component}: {one.explanation}" for one in lost) or found.reason
        raise RegradeRefused(f"rollout {rollout_id} keeps its grades, since a new one failed: {cause}")
    return found.total
