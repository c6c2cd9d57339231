"""Agents' keys: signed tokens with one attempt, its scopes and its expiry. Verification reads no database.

The runner signs, the gateway and the collector verify; they share a key ring file (see `keyring`).

CapabilityError  the key is not valid for this endpoint; `cause` names the reason, `status` is the HTTP status
"""

from leyden.libs.capability.capability import CapabilityError, Cause, key_from_headers, read_key, sign, verify
from leyden.libs.capability.keyring import KeyRing, KeyRingError, write_keys

__all__ = [
    "CapabilityError",
    "Cause",
    "KeyRing",
    "KeyRingError",
    "key_from_headers",
    "read_key",
    "sign",
    "verify",
    "write_keys",
]
