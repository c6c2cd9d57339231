"""The lease and the end of one attempt; services lease and settle many at once."""

from __future__ import annotations

from leyden.libs.queue.leases import Lease, Outcome, lease_rollouts, settle_all
from leyden.libs.store.database import Session


async def lease_rollout(session: Session, rollout_id: str, owner: str, seconds: float) -> Lease | None:
    """The lease of the next attempt of one rollout; None when there is nothing to execute."""
    leased = await lease_rollouts(session, [rollout_id], owner, seconds)
    return leased[0] if leased else None


async def settle(session: Session, lease: Lease, outcome: Outcome) -> bool:
    """Ends one attempt; False when its lease was lost."""
    return bool(await settle_all(session, [(lease, outcome)]))
