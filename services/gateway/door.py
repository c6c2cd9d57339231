"""The address an agent was given, once its key has been found to open it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from leyden.libs.capability import CapabilityError, Cause, KeyRing, key_from_headers, verify
from leyden.libs.contracts.capability import Scope
from leyden.libs.contracts.ids import NUMBER
from leyden.libs.queue.attempt_liveness import AttemptEnded, AttemptLiveness
from leyden.libs.store.attempts import AttemptKey
from leyden.libs.store.calls import StoreAway
from leyden.services.gateway.errors import KeyRefused, NotServed, Unavailable

BELIEF_SECONDS = 5.0
MAX_BELIEVED = 10_000


@dataclass(frozen=True, slots=True)
class Door:
    """One attempt of one rollout: the path says who, the key has said may."""

    run_id: str
    rollout_id: str
    attempt: int

    @property
    def key(self) -> AttemptKey:
        """Rollout id and attempt number."""
        return AttemptKey(self.rollout_id, self.attempt)


class Doors:
    """Opens doors of attempts that run. A key is believed for `BELIEF_SECONDS` after it was verified: agents send it
    with every call.

    Verifying costs a fifth of a millisecond; a key taken out of the ring stops working within seconds.
    """

    def __init__(self, ring: KeyRing, liveness: AttemptLiveness) -> None:
        self._ring = ring
        self._living = liveness
        self._believed: dict[tuple[str | None, str, str], tuple[Door, float]] = {}

    async def open(self, headers: Mapping[str, str], rollout_id: str, attempt: str) -> Door:
        """The door that path and key agree on, of an attempt that runs.

        Raises: NotServed: the attempt is no number; KeyRefused: the key is missing, bad, expired, or another door's, or
            its attempt has ended; Unavailable: the store is away, and nobody can say whether it has
        """
        door = self._agreed(headers, rollout_id, attempt)
        try:
            await self._living.confirm(door.rollout_id, door.attempt)
        except AttemptEnded as error:
            raise refusal(CapabilityError(Cause.ENDED)) from error
        except StoreAway as error:
            message = "The store is away, so nobody can say whether this attempt runs; try again."
            raise Unavailable(message, code="store_unavailable", retry_after_seconds=5) from error
        return door

    def _agreed(self, headers: Mapping[str, str], rollout_id: str, attempt: str) -> Door:
        claim = (key_from_headers(headers), rollout_id, attempt)
        door, until = self._believed.get(claim, (None, 0.0))
        now = time.monotonic()
        if door is None or now >= until:
            self._forget(now)
            door = self._verified(*claim)
            self._believed.pop(claim, None)
            self._believed[claim] = (door, now + BELIEF_SECONDS)
        return door

    def _forget(self, now: float) -> None:
        """Drops what is believed no longer; the oldest beliefs stand first."""
        while self._believed:
            oldest = next(iter(self._believed))
            if now < self._believed[oldest][1] and len(self._believed) < MAX_BELIEVED:
                return
            del self._believed[oldest]

    def _verified(self, key: str | None, rollout_id: str, attempt: str) -> Door:
        if not NUMBER.fullmatch(attempt):
            message = f"'{attempt}' is no attempt: use the base URL from the agent's environment."
            raise NotServed(message, code="not_found")
        try:
            capability = verify(self._ring, key, rollout_id=rollout_id, attempt=int(attempt), scope=Scope.MODEL)
        except CapabilityError as error:
            raise refusal(error) from error
        return Door(capability.run_id, capability.rollout_id, capability.attempt)


def refusal(error: CapabilityError) -> KeyRefused:
    """The refusal in OpenAI's shape."""
    return KeyRefused(f"{error}.", status=error.status, cause=error.cause)
