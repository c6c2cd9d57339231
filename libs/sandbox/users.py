"""The user that a program becomes: one of its own, or that of the service."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import struct
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from leyden.libs.sandbox.place import Place
from leyden.libs.sandbox.sandbox import USABLE_LANDLOCK, landlock_abi
from leyden.libs.service.errors import Misconfigured
from leyden.libs.telemetry import logger

log = logger()

UIDS = 20_000
"""User ids that programs take in turn: long before one comes again, nothing of its last program is left."""
UIDS_FROM = 1_900_000_000
UIDS_FROM_IN_A_NAMESPACE = 30_000
REMEDIES = "let other users pass (chmod o+x), put it elsewhere, or run the service as an ordinary user"


@dataclass(frozen=True)
class SandboxUser:
    """The user (and group) id of one program and the lock on it; both None to stay the service's user."""

    uid: int | None = None
    lock: int | None = None


class SandboxUsers:
    """Lends user ids that belong to nobody, each to one program at a time, among all services of this machine.

    Args: first: the lowest, None to leave every program the service's user; locks: a file whose byte at an id's
        position is locked while the id is lent. Every holder of the descriptor holds the lock, the supervisor too, so
        that the programs of a killed service keep their ids.
    """

    def __init__(self, first: int | None, locks: Path) -> None:
        self.first = first
        self._locks = str(locks)
        self._next = secrets.randbelow(UIDS)

    @contextmanager
    def lend(self) -> Iterator[SandboxUser]:
        """The user of one program, for as long as anything of it exists.

        Raises: OSError: every one is lent
        """
        if self.first is None:
            yield SandboxUser()
            return
        lock = os.open(self._locks, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            yield SandboxUser(self._lock_one(self.first, lock), lock)
        finally:
            os.close(lock)

    def _lock_one(self, first: int, lock: int) -> int:
        for _ in range(UIDS):
            uid = first + self._next
            self._next = (self._next + 1) % UIDS
            try:
                byte = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, uid, 1, 0)
                fcntl.fcntl(lock, fcntl.F_OFD_SETLK, byte)
            except BlockingIOError:
                continue
            return uid
        raise OSError(f"each of the {UIDS} user ids from {first} is in use by an attempt")


def sandbox_users(place: Place) -> SandboxUsers:
    """The users that a place's rule asks for; `auto` falls back to the service's own, as root only with Landlock.

    Raises: Misconfigured: the rule or the first user id cannot be followed
    """
    folder = next((path for path in ("/run", "/var/run") if os.access(path, os.W_OK)), tempfile.gettempdir())
    locks = Path(folder) / "leyden-agent-users"
    if place.user == "same" or (place.user == "auto" and os.geteuid() != 0):
        return SandboxUsers(None, locks)
    try:
        return SandboxUsers(_first_uid(place), locks)
    except Misconfigured as error:
        if place.user == "own" or place.uids_from is not None or landlock_abi() < USABLE_LANDLOCK:
            raise
        program = place.names.program
        log.warning(f"{program}s run as root without capabilities, not as users of their own", reason=str(error))
        return SandboxUsers(None, locks)


def _first_uid(place: Place) -> int:
    """The lowest user id for programs.

    Raises: Misconfigured: programs cannot have users of their own here
    """
    names = place.names
    if os.geteuid() != 0:
        raise Misconfigured(f"{names.setting('USER')}=own needs a service that runs as root: leave it unset")
    chosen = place.uids_from
    python = shutil.which(place.python, path=place.path) or place.python
    closed = closed_to(chosen or UIDS_FROM, [python])
    if closed is not None:
        raise Misconfigured(f"{closed} is closed to other users, and {names.prefix}_PYTHON lies below it: {REMEDIES}")
    mapped = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    for first in (UIDS_FROM, UIDS_FROM_IN_A_NAMESPACE) if chosen is None else (chosen,):
        if any(inside <= first and first + UIDS <= inside + count for inside, _, count in mapped):
            return first
    raise Misconfigured(
        f"this user namespace does not have the {UIDS} user ids that {names.program}s take: set"
        f" {names.setting('UIDS_FROM')} to the first of as many that nobody has"
    )


def closed_to(uid: int, paths: Iterable[str]) -> str | None:
    """The first folder on the way to one of these paths, as named and without links, that a user cannot pass."""
    for way in (Path(way) for path in paths for way in (path, os.path.realpath(path))):
        for folder in (folder for folder in reversed(way.parents) if folder.exists()):
            found = folder.stat()
            shift = 6 if found.st_uid == uid else 3 if found.st_gid == uid else 0
            if not found.st_mode >> shift & 1:
                return str(folder)
    return None
