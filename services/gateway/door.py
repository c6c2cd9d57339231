"""The address an agent was given, once its key has been found to open it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from libs.capability import CapabilityError, KeyRing, key_from_headers, verify
from libs.contracts.capability import Scope
from services.gateway.errors import KeyRefused, NotServed


@dataclass(frozen=True, slots=True)
class Door:
    """One attempt of one rollout: the path says who, the key has said may."""

    run_id: str
    rollout_id: str
    attempt: int

    @property
    def key(self) -> tuple[str, int]:
        """Rollout id and attempt number."""
        return self.rollout_id, self.attempt


def open_door(ring: KeyRing, headers: Mapping[str, str], rollout_id: str, attempt: str) -> Door:
    """The door that path and key agree on.

    Raises: NotServed: the attempt is no number; KeyRefused: the key is missing, bad, expired, or another door's
    """
    if not attempt.isdecimal() or len(attempt) > 9:
        raise NotServed(f"'{attempt}' is no attempt: use the base URL from the agent's environment.", code="not_found")
    try:
        capability = verify(
            ring, key_from_headers(headers), rollout_id=rollout_id, attempt=int(attempt), scope=Scope.MODEL
        )
    except CapabilityError as error:
        raise KeyRefused(f"{error}.", status=error.status, cause=error.cause) from error
    return Door(capability.run_id, capability.rollout_id, capability.attempt)
