"""What holds an agent in its cell, as system calls: a view of the disk, a user of its own, Landlock.

Runs in the forked child of the keeper, between `fork` and `exec`, and depends on the standard library alone, because
64 of these start at once. What to hide and whom to become was decided by `leyden.services.runner.cell`.
"""
# pathlib costs more start-up time than everything else here:
# ruff: noqa: PTH103, PTH112, PTH120, PTH211

from __future__ import annotations

import ctypes
import os
import struct

TYPE_CHECKING = False
"""mypy takes it for true. Importing `typing` costs a third of the start of a keeper."""

if TYPE_CHECKING:
    from typing import TypedDict

    class Walls(TypedDict):
        """Orders of one cell.

        `user`: (uid, gid) to become; `own_user`: whether nobody else has that uid. `covers`: folders that the agent
        finds empty, in a view of the disk of its own, but for `links` (path, target) and `shows` (path, whether it may
        write there). `own_processes`: whether /proc shows there the processes of its own user alone. `hidden`: folders
        that Landlock closes, but for `shows`, where there is no such view. `landlock`: whether to use it at all.
        """

        user: tuple[int, int] | None
        own_user: bool
        covers: list[str]
        links: list[tuple[str, str]]
        shows: list[tuple[str, bool]]
        own_processes: bool
        hidden: list[str]
        landlock: bool

else:
    Walls = dict

PR_SET_NO_NEW_PRIVS = 38
CLONE_NEWNS, CLONE_NEWIPC = 0x20000, 0x8000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18

# The same numbers on every architecture.
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
LANDLOCK_CREATE_RULESET_VERSION, LANDLOCK_RULE_PATH_BENEATH = 1, 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
REFER, TRUNCATE = 1 << 13, 1 << 14
SCOPE_ABSTRACT_UNIX_SOCKET, SCOPE_SIGNAL = 1, 2
USABLE_LANDLOCK = 2
"""The first would refuse every rename from one folder to another."""
SIGNAL_LANDLOCK = 6
"""The first that holds signals in."""

_libc = ctypes.CDLL(None, use_errno=True)


def no_walls() -> Walls:
    """Orders of a cell that holds nothing in."""
    return Walls(
        user=None, own_user=False, covers=[], links=[], shows=[], own_processes=False, hidden=[], landlock=False
    )


def close_in(walls: Walls) -> None:
    """Puts the calling process, which has one thread, behind the walls.

    Raises: OSError: the kernel refuses one of them; the agent must not start then.
    """
    if walls["covers"]:
        cover(walls["covers"], walls["links"], walls["shows"])
        if walls["own_processes"]:
            cover_processes()
    ruleset = landlock_ruleset(walls["hidden"], [path for path, _ in walls["shows"]]) if walls["landlock"] else None
    if walls["user"] is not None:
        become(*walls["user"])
    if walls["own_user"]:
        kill_all_of_this_user()
    _check(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    if ruleset is not None:
        _check(_libc.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
        os.close(ruleset)


def become(uid: int, gid: int) -> None:
    """Becomes a user for good: no group but its own, and no capability, which the kernel drops with user 0."""
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def kill_all_of_this_user() -> None:
    """SIGKILLs every other process of this user in one call that no fork can outrun. Never as root."""
    try:
        os.kill(-1, 9)
    except ProcessLookupError:
        return


def cover(covers: list[str], links: list[tuple[str, str]], shows: list[tuple[str, bool]]) -> None:
    """Moves into a view of the disk in which `covers` are empty but for what is shown.

    Raises: OSError: not root, no right to mount, or a path that does not exist.
    """
    _check(_libc.unshare(CLONE_NEWNS | CLONE_NEWIPC), "unshare")
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    sources = [(path, writable, os.open(path, os.O_PATH | os.O_CLOEXEC)) for path, writable in shows]
    for path in covers:
        _mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0711,size=1m,nr_inodes=1k")
    old = os.umask(0o066)
    for path, writable, source in sources:
        _show(path, source, writable=writable)
    for path, target in links:
        os.makedirs(os.path.dirname(path), mode=0o711, exist_ok=True)
        # Inside of what is shown it stands already.
        if not os.path.lexists(path):
            os.symlink(target, path)
    os.umask(old)


def cover_processes() -> None:
    """Mounts a /proc in which a user finds no process of others: in the usual one arguments are open, and keys in them.

    By its name the option is known to kernels alone (5.8 or later) where it changes no other mount.

    Raises: OSError: the kernel refuses
    """
    _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "hidepid=invisible")


def holds_signals(walls: Walls) -> bool:
    """Whether Landlock keeps signals within a cell; agents of one user could else end each other."""
    return walls["landlock"] and landlock_abi() >= SIGNAL_LANDLOCK


def _show(path: str, source: int, *, writable: bool) -> None:
    if os.path.isdir(f"/proc/self/fd/{source}"):
        os.makedirs(path, mode=0o711, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), mode=0o711, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_CLOEXEC, 0o600))
    _mount(f"/proc/self/fd/{source}", path, None, MS_BIND)
    if not writable:
        _mount(None, path, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.close(source)


def landlock_abi() -> int:
    """Version of Landlock that this kernel speaks; 0 where it is absent or switched off."""
    return max(0, int(_libc.syscall(LANDLOCK_CREATE_RULESET, None, 0, LANDLOCK_CREATE_RULESET_VERSION)))


def landlock_ruleset(hidden: list[str], shown: list[str]) -> int:
    """A descriptor of rules: everything but `hidden`, and `shown` even there; no signal and no ptrace out of the cell.

    Landlock only allows, and what it allows for a folder it allows below: so every sibling along the way to a hidden
    folder is allowed, and the folders on that way are not themselves. Names may be listed everywhere.

    Raises: OSError: there is no Landlock
    """
    abi = landlock_abi()
    handled = (1 << 13) - 1 & ~READ_DIR | REFER | (TRUNCATE if abi >= 3 else 0)
    scoped = SCOPE_ABSTRACT_UNIX_SOCKET | SCOPE_SIGNAL if abi >= SIGNAL_LANDLOCK else 0
    attributes = struct.pack("QQQ", handled, 0, scoped)[: 24 if abi >= SIGNAL_LANDLOCK else 8]
    ruleset = _check(
        _libc.syscall(LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0),
        "landlock_create_ruleset",
    )
    for path in [*_siblings("/", hidden), *shown]:
        _allow(ruleset, path, handled)
    return ruleset


def _siblings(folder: str, hidden: list[str]) -> list[str]:
    """The folder, or, with something hidden below, what else is in it and in the folders on the way there."""
    if folder in hidden:
        return []
    start = folder.rstrip("/") + "/"
    below = {path[len(start) :].split("/")[0] for path in hidden if path.startswith(start)}
    if not below:
        return [folder]
    try:
        with os.scandir(folder) as entries:
            # A link leads to where its target is allowed or not.
            below |= {entry.name for entry in entries if not entry.is_symlink()}
    except PermissionError:
        # It may be passed and not listed: at least the way to what is hidden is known.
        pass
    return [path for name in sorted(below) for path in _siblings(start + name, hidden)]


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        # Gone since it was listed.
        return
    if not os.path.isdir(f"/proc/self/fd/{descriptor}"):
        rights &= EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE
    rule = struct.pack("=Qi", rights, descriptor)
    _check(_libc.syscall(LANDLOCK_ADD_RULE, ruleset, LANDLOCK_RULE_PATH_BENEATH, rule, 0), f"landlock_add_rule {path}")
    os.close(descriptor)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, options)]
    arguments = (words[0], words[1], words[2], ctypes.c_ulong(flags), words[3])
    _check(_libc.mount(*arguments), f"mount on {target}")


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
