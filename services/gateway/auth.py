"""Authenticates requests: the key names an attempt, and so may the path, which then must name the same."""

from __future__ import annotations

from collections.abc import Mapping

from cachetools import TTLCache

from leyden.libs.capability import CapabilityError, Cause, KeyRing, key_from_headers, verify
from leyden.libs.contracts.capability import PLAYGROUND, Scope
from leyden.libs.contracts.ids import NUMBER
from leyden.libs.queue.attempt_liveness import AttemptEnded, AttemptLiveness
from leyden.libs.store.database import StoreAway
from leyden.services.gateway.calls.context import Attempt
from leyden.services.gateway.errors import KeyRefused, NotServed, Unavailable

CACHE_TTL_SECONDS = 5.0
MAX_CACHED = 10_000


class Authenticator:
    """Checks keys and caches a verified one for `CACHE_TTL_SECONDS`.

    Why: agents send one key with every call, and verifying costs 0.2 ms. A removed secret stays valid for that time.
    """

    def __init__(self, ring: KeyRing, liveness: AttemptLiveness) -> None:
        self._ring = ring
        self._liveness = liveness
        self._verified: TTLCache[tuple[str | None, str | None, str], Attempt] = TTLCache(MAX_CACHED, CACHE_TTL_SECONDS)

    def attempt_of(self, headers: Mapping[str, str], rollout_id: str | None, attempt: str) -> Attempt:
        """Returns the attempt that both path and key name; it may have ended.

        Args: rollout_id, attempt: of the path; None and an empty text where the key alone names the attempt
        Raises: NotServed: the attempt is no number; KeyRefused: the key is missing, bad, expired, or another attempt's
        """
        claim = (key_from_headers(headers), rollout_id, attempt)
        found = self._verified.get(claim)
        if found is None:
            found = self._verified[claim] = self._verify(*claim)
        return found

    def policy_of(self, headers: Mapping[str, str]) -> str:
        """Returns the policy that a person's key opens. Raises: KeyRefused: it is no key of the playground."""
        try:
            key = key_from_headers(headers)
            return verify(self._ring, key, rollout_id=PLAYGROUND, attempt=0, scope=Scope.PLAYGROUND).run_id
        except CapabilityError as error:
            raise refusal(error) from error

    def is_confirmed(self, attempt: Attempt) -> bool:
        """Whether `confirm` would return at once."""
        return self._liveness.is_confirmed(attempt.rollout_id, attempt.attempt)

    async def confirm(self, attempt: Attempt) -> None:
        """Returns if the attempt runs.

        Raises: KeyRefused: it has ended; Unavailable: the store is down, so the gateway cannot check that
        """
        try:
            await self._liveness.confirm(attempt.rollout_id, attempt.attempt)
        except AttemptEnded as error:
            raise refusal(CapabilityError(Cause.ENDED)) from error
        except StoreAway as error:
            message = "The store is down, so the gateway cannot check whether this attempt still runs; try again."
            raise Unavailable(message, code="store_unavailable", retry_after_seconds=5) from error

    def _verify(self, key: str | None, rollout_id: str | None, attempt: str) -> Attempt:
        if rollout_id is not None and not NUMBER.fullmatch(attempt):
            message = f"'{attempt}' is no attempt: use the base URL from the agent's environment."
            raise NotServed(message, code="not_found")
        try:
            number = None if rollout_id is None else int(attempt)
            capability = verify(self._ring, key, rollout_id=rollout_id, attempt=number, scope=Scope.MODEL)
        except CapabilityError as error:
            raise refusal(error) from error
        return Attempt(capability.run_id, capability.rollout_id, capability.attempt, capability.greedy)


def refusal(error: CapabilityError) -> KeyRefused:
    """Converts a rejected key to an error in OpenAI's shape."""
    return KeyRefused(f"{error}.", status=error.status, cause=error.cause)
