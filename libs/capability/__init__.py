"""An agent's key: a signed statement of one attempt, its scopes and its expiry. Verifying it reads no database.

The runner signs, the gateway and the collector verify; they share a key ring file (see `keyring`).

CapabilityError  the key does not allow this endpoint; `cause` says why, `status` is the HTTP answer
"""

from leyden.libs.capability.capability import CapabilityError, Cause, key_from_headers, sign, verify
from leyden.libs.capability.keyring import KeyRing, KeyRingError, write_keys

__all__ = [
    "CapabilityError",
    "Cause",
    "KeyRing",
    "KeyRingError",
    "key_from_headers",
    "sign",
    "verify",
    "write_keys",
]
