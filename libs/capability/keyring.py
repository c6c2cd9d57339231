"""The secrets that sign agents' keys: a JSON file `{kid: secret}`. Its first entry signs; all entries verify.

Rotation without a restart: insert the new secret first, and remove the old one when the last key that it signed has
expired. The ring reloads the file when its time, size or inode changes: Kubernetes replaces a symbolic link.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from leyden.libs.contracts.capability import Capability
from leyden.libs.service.errors import Misconfigured
from leyden.libs.service.secrets import SecretError, refuse_open
from leyden.libs.telemetry import logger

MIN_SECRET_LENGTH = 32
"""Characters; RFC 7518 3.2 requires at least 256 bits for HS256."""

MAX_VERIFIED = 10_000
"""Size of the cache of verified keys; the oldest entry is evicted first."""

log = logger()


class KeyRingError(Misconfigured):
    """The key ring file is missing or invalid; the message names the remedy."""


class KeyRing:
    """Loads signing secrets from a file, reloads them when it changes, and caches verified keys.

    Args: clock: returns seconds since the epoch; use the store's clock, because the runner computes the expiry by it
    Raises: KeyRingError: at construction. If a later version of the file is invalid, the ring logs it and uses the old.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = lambda: time.time()) -> None:
        self.clock = clock
        self._path = path
        self._stamp = _stamp(path)
        self._keys = read_keys(path)
        self._verified: dict[str, Capability] = {}

    @property
    def signing(self) -> tuple[str, str]:
        """Returns the key id and the secret that sign new keys."""
        return next(iter(self._current().items()))

    def secret(self, kid: str) -> str | None:
        """Returns the secret of a key id; None for an unknown id."""
        return self._current().get(kid)

    def cached(self, key: str) -> Capability | None:
        """Returns the capability of a key in the cache; None if it is not cached."""
        self._current()
        return self._verified.get(key)

    def cache(self, key: str, capability: Capability) -> None:
        """Adds a verified key to the cache; a change of the file empties it."""
        self._verified[key] = capability
        if len(self._verified) > MAX_VERIFIED:
            del self._verified[next(iter(self._verified))]

    def _current(self) -> dict[str, str]:
        try:
            stamp = _stamp(self._path)
            if stamp != self._stamp:
                self._stamp = stamp
                self._keys = read_keys(self._path)
                self._verified.clear()
        except KeyRingError as error:
            log.error("key ring not reloaded", path=str(self._path), cause=str(error))
        return self._keys


def read_keys(path: Path) -> dict[str, str]:
    """Reads the secrets of a file, in its order.

    Raises: KeyRingError: the file is missing, open to other users, invalid or empty, or a secret is too short.
    """
    try:
        refuse_open(path)
        keys = json.loads(path.read_text(encoding="utf-8"))
    except SecretError as error:
        raise KeyRingError(str(error)) from error
    except (OSError, ValueError, RecursionError) as error:
        raise KeyRingError(f"cannot read the key ring {path}: {error}; write a JSON object {{kid: secret}}") from error
    if not isinstance(keys, dict) or not keys or not all(isinstance(secret, str) for secret in keys.values()):
        raise KeyRingError(f"the key ring {path} must be a JSON object {{kid: secret}} with at least one key")
    short = [kid for kid, secret in keys.items() if len(secret) < MIN_SECRET_LENGTH]
    if short:
        raise KeyRingError(f"keys {short} in {path} are shorter than {MIN_SECRET_LENGTH} characters: make longer ones")
    return keys


def write_keys(path: Path, keys: dict[str, str] | None = None) -> None:
    """Writes a key ring by one rename, readable for its owner alone; without `keys`, it generates one secret."""
    keys = keys or {f"k-{secrets.token_hex(4)}": secrets.token_urlsafe(48)}
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(keys, file)
    scratch.replace(path)


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise KeyRingError(
            f"cannot read the key ring {path}: {error.strerror}; set LEYDEN_CAPABILITY_KEYS_FILE to a JSON file"
            " {kid: secret}"
        ) from error
    return status.st_mtime_ns, status.st_size, status.st_ino
