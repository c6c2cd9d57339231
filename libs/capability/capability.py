"""Signs and verifies agents' keys: JSON web tokens (RFC 7519) with HS256, which PyJWT compares in constant time."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import jwt

from leyden.libs.capability.keyring import KeyRing
from leyden.libs.contracts.capability import Capability, Scope

ISSUER = "leyden"
LEEWAY_SECONDS = 30
"""How long a key stays valid after its expiry."""
MAX_KEY_LENGTH = 4096


class Cause(StrEnum):
    """The reason of a refusal, for metrics and error bodies."""

    MISSING = "missing"
    MALFORMED = "malformed"
    EXPIRED = "expired"
    ENDED = "ended"
    WRONG_ROLLOUT = "wrong_rollout"
    WRONG_SCOPE = "wrong_scope"


_MESSAGES = {
    Cause.MISSING: "no key: send the one from the agent's environment as `Authorization: Bearer` or `x-api-key`",
    Cause.MALFORMED: "this platform has not signed the key: use the one from the agent's environment",
    Cause.EXPIRED: "the key has expired: its attempt is over",
    Cause.ENDED: "the attempt of this key has ended: its requests are refused",
    Cause.WRONG_ROLLOUT: "the key belongs to another attempt than the one in the address",
    Cause.WRONG_SCOPE: "the key does not allow this endpoint",
}


class CapabilityError(Exception):
    """A key is not valid for an endpoint. `cause` is for programs; `status` is 401 without a valid key, else 403."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(_MESSAGES[cause])
        self.cause = cause
        self.status = 403 if cause in {Cause.WRONG_ROLLOUT, Cause.WRONG_SCOPE, Cause.ENDED} else 401


def sign(ring: KeyRing, capability: Capability) -> str:
    """Signs the key of an attempt, for its agent's environment."""
    kid, secret = ring.signing
    claims = {
        "iss": ISSUER,
        "run": capability.run_id,
        "rollout": capability.rollout_id,
        "attempt": capability.attempt,
        "scopes": sorted(capability.scopes),
        "exp": capability.expires_at,
        "greedy": capability.greedy,
    }
    return jwt.encode(claims, secret, algorithm="HS256", headers={"kid": kid})


def verify(ring: KeyRing, key: str | None, *, rollout_id: str | None, attempt: int | None, scope: Scope) -> Capability:
    """Checks that a key is valid for this endpoint of this attempt, and returns its capability.

    Args: rollout_id, attempt: those in the address; None where the key alone names the attempt
    Raises: CapabilityError: with the cause.
    """
    capability = read_key(ring, key)
    if rollout_id is not None and (capability.rollout_id, capability.attempt) != (rollout_id, attempt):
        raise CapabilityError(Cause.WRONG_ROLLOUT)
    if scope not in capability.scopes:
        raise CapabilityError(Cause.WRONG_SCOPE)
    return capability


def read_key(ring: KeyRing, key: str | None) -> Capability:
    """The capability in a key that has not expired, for whichever attempt and endpoint.

    Raises: CapabilityError: with the cause.
    """
    if not key:
        raise CapabilityError(Cause.MISSING)
    capability = ring.cached(key)
    if capability is None:
        capability = _decode(ring, key)
        ring.cache(key, capability)
    if capability.expires_at <= ring.clock() - LEEWAY_SECONDS:
        raise CapabilityError(Cause.EXPIRED)
    return capability


def key_from_headers(headers: Mapping[str, str]) -> str | None:
    """Returns the key of `Authorization: Bearer …`, else of `x-api-key`, or of Azure's or Google's header.

    Args: headers: a mapping with lower-case names
    """
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip()
    return headers.get("x-api-key") or headers.get("api-key") or headers.get("x-goog-api-key") or None


def _decode(ring: KeyRing, key: str) -> Capability:
    try:
        claims = jwt.decode(
            key,
            _secret_of(ring, key),
            algorithms=["HS256"],
            issuer=ISSUER,
            options={"require": ["exp", "iss"], "verify_exp": False},
        )
        return _capability(claims)
    # Pydantic's ValidationError and the error of a key that is not a string are ValueErrors.
    except (jwt.PyJWTError, ValueError, KeyError) as error:
        raise CapabilityError(Cause.MALFORMED) from error


def _secret_of(ring: KeyRing, key: str) -> str:
    if len(key) > MAX_KEY_LENGTH:
        raise jwt.DecodeError("too long")
    secret = ring.secret(str(jwt.get_unverified_header(key).get("kid")))
    if secret is None:
        raise jwt.InvalidKeyError("unknown kid")
    return secret


def _capability(claims: dict[str, Any]) -> Capability:
    return Capability(
        run_id=claims["run"],
        rollout_id=claims["rollout"],
        attempt=claims["attempt"],
        scopes=claims["scopes"],
        expires_at=claims["exp"],
        greedy=claims.get("greedy", False),
    )
