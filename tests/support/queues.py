"""The lease and the end of one attempt; services lease and settle many at once."""

from __future__ import annotations

from leyden.libs.queue.leases import Lease, Outcome, expire_overdue, lease_rollouts, settle_all
from leyden.libs.store.database import Session
from leyden.services.controller.runs import settling


async def lease_rollout(session: Session, rollout_id: str, owner: str, seconds: float) -> Lease | None:
    """The lease of the next attempt of one rollout; None when there is nothing to execute."""
    leased = await lease_rollouts(session, [rollout_id], owner, seconds)
    return leased[0] if leased else None


async def settle(session: Session, lease: Lease, outcome: Outcome) -> bool:
    """Ends one attempt; False when its lease was lost."""
    return bool(await settle_all(session, [(lease, outcome)]))


async def control(session: Session) -> None:
    """The controller's part: ends overdue leases, and lets rollouts run again at once after platform failures."""
    await expire_overdue(session)
    await settling.settle(session, groups_without_success=1000, retry_base=0.0)
