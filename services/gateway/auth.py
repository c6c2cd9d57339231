"""Authentication: the path names the attempt, and the key says whether its agent may."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cachetools import TTLCache

from leyden.libs.capability import CapabilityError, Cause, KeyRing, key_from_headers, verify
from leyden.libs.contracts.capability import Scope
from leyden.libs.contracts.ids import NUMBER
from leyden.libs.queue.attempt_liveness import AttemptEnded, AttemptLiveness
from leyden.libs.store.attempts import AttemptKey
from leyden.libs.store.calls import StoreAway
from leyden.services.gateway.errors import KeyRefused, NotServed, Unavailable

CACHE_TTL_SECONDS = 5.0
MAX_CACHED = 10_000


@dataclass(frozen=True, slots=True)
class Attempt:
    """The attempt whose agent asks."""

    run_id: str
    rollout_id: str
    attempt: int

    @property
    def key(self) -> AttemptKey:
        """Rollout id and attempt number."""
        return AttemptKey(self.rollout_id, self.attempt)


class Authenticator:
    """Checks keys. Agents send the same key with every call, so a verified one is cached for `CACHE_TTL_SECONDS`.

    Why: verifying costs 0.2 ms. A key that leaves the ring stops working within that time.
    """

    def __init__(self, ring: KeyRing, liveness: AttemptLiveness) -> None:
        self._ring = ring
        self._liveness = liveness
        self._verified: TTLCache[tuple[str | None, str, str], Attempt] = TTLCache(MAX_CACHED, CACHE_TTL_SECONDS)

    async def authenticate(self, headers: Mapping[str, str], rollout_id: str, attempt: str) -> Attempt:
        """The running attempt that path and key agree on.

        Raises: NotServed: the attempt is no number; KeyRefused: the key is missing, bad, expired, or another attempt's,
            or its attempt has ended; Unavailable: the store is away, so nobody can say whether it has
        """
        found = self._agreed(headers, rollout_id, attempt)
        try:
            await self._liveness.confirm(found.rollout_id, found.attempt)
        except AttemptEnded as error:
            raise refusal(CapabilityError(Cause.ENDED)) from error
        except StoreAway as error:
            message = "The store is away, so nobody can say whether this attempt runs; try again."
            raise Unavailable(message, code="store_unavailable", retry_after_seconds=5) from error
        return found

    def _agreed(self, headers: Mapping[str, str], rollout_id: str, attempt: str) -> Attempt:
        claim = (key_from_headers(headers), rollout_id, attempt)
        found = self._verified.get(claim)
        if found is None:
            found = self._verified[claim] = self._verify(*claim)
        return found

    def _verify(self, key: str | None, rollout_id: str, attempt: str) -> Attempt:
        if not NUMBER.fullmatch(attempt):
            message = f"'{attempt}' is no attempt: use the base URL from the agent's environment."
            raise NotServed(message, code="not_found")
        try:
            capability = verify(self._ring, key, rollout_id=rollout_id, attempt=int(attempt), scope=Scope.MODEL)
        except CapabilityError as error:
            raise refusal(error) from error
        return Attempt(capability.run_id, capability.rollout_id, capability.attempt)


def refusal(error: CapabilityError) -> KeyRefused:
    """The refusal in OpenAI's shape."""
    return KeyRefused(f"{error}.", status=error.status, cause=error.cause)
