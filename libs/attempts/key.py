"""The key of an attempt, which names it at the gateway and the collector."""

from __future__ import annotations

from leyden.libs.capability import KeyRing, sign
from leyden.libs.contracts.capability import Capability, Scope
from leyden.libs.queue.leases import Lease

LATE_SECONDS = 600
"""So long an agent's key outlives its attempt's timeout, for spans that arrive late."""


def attempt_key(keys: KeyRing, lease: Lease, *, start_seconds: float = 0.0, grace_seconds: float = 0.0) -> str:
    """Signs the key of a lease's attempt, with the scopes that its run grants.

    Args: start_seconds: the longest time from the lease to the agent's begin; grace_seconds: between the attempt's
        timeout and its end
    """
    granted = {Scope.REWARD: lease.runner.grant_reward, Scope.FEEDBACK: lease.takes_feedback}
    scopes = {Scope.MODEL, Scope.TELEMETRY, *(scope for scope, is_granted in granted.items() if is_granted)}
    lifetime = start_seconds + lease.runner.timeout_seconds + grace_seconds + LATE_SECONDS
    capability = Capability(
        run_id=lease.run_id,
        rollout_id=lease.rollout_id,
        attempt=lease.attempt,
        scopes=frozenset(scopes),
        greedy=lease.greedy,
        # By the database's clock, as the lease itself: a service's own may be wrong.
        expires_at=int(lease.expires_at.timestamp() + lifetime),
    )
    return sign(keys, capability)
