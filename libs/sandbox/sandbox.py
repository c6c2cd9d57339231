"""The bounds of a program: a user of its own, no capabilities, no new privileges, Landlock, fewer system calls.

The forked child of the supervisor runs them between `fork` and `exec`, with the standard library alone.
"""
# pathlib costs more start-up time than everything else here:
# ruff: noqa: PTH112

from __future__ import annotations

import ctypes
import os
import struct

# Relative: in its own process this file is no part of `leyden`.
from .system_calls import refuse_system_calls  # noqa: TID251
from .view import COVERED, check, show  # noqa: TID251

TYPE_CHECKING = False
"""mypy takes it for true. Importing `typing` costs a third of the start of a supervisor."""

if TYPE_CHECKING:
    from typing import TypedDict

    from .view import View  # noqa: TID251

    class Sandbox(TypedDict):
        """Bounds of one agent.

        `uid`: the user and group that it becomes, which no other attempt has; None for the runner's. `landlock`:
        whether to use Landlock, which closes the paths `hidden` but for the folder `visible`. `writable`: the folders
        outside of `visible` in which it may write, None for no such bound. `filter`: whether to close user namespaces
        and io_uring, by seccomp; `network`: whether it leaves sockets open. `view`: the files that it sees, in which
        `visible` has its path; None for those of the machine.
        """

        uid: int | None
        landlock: bool
        hidden: list[str]
        visible: str
        writable: list[str] | None
        filter: bool
        network: bool
        view: View | None


PR_SET_NO_NEW_PRIVS = 38
CAPABILITY_VERSION_3 = 0x20080522
# The same numbers on every architecture.
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
LANDLOCK_CREATE_RULESET_VERSION, LANDLOCK_RULE_PATH_BENEATH = 1, 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
REFER, TRUNCATE = 1 << 13, 1 << 14
SCOPE_ABSTRACT_UNIX_SOCKET, SCOPE_SIGNAL = 1, 2
USABLE_LANDLOCK = 2
"""The first version would refuse every rename from one folder to another."""
SIGNAL_LANDLOCK = 6
"""The first version that confines signals to a sandbox."""

_libc = ctypes.CDLL(None, use_errno=True)


def enter(sandbox: Sandbox) -> None:
    """Puts the calling process, which has one thread, into its sandbox.

    Raises: OSError: the kernel refuses; the agent must not start then
    """
    if sandbox["view"] is not None:
        show(sandbox["view"])
    # Before the change of user: afterwards some folders can no longer be opened.
    ruleset = landlock_ruleset(sandbox) if sandbox["landlock"] else None
    if sandbox["uid"] is not None:
        become(sandbox["uid"])
        kill_all_of_this_user()
    drop_capabilities()
    check(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    if ruleset is not None:
        check(_libc.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
        os.close(ruleset)
    if sandbox["filter"]:
        refuse_system_calls(network=sandbox["network"])


def become(uid: int) -> None:
    """Becomes a user for good, with no group but its own."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def kill_all_of_this_user() -> None:
    """SIGKILLs every other process of this user in one call that no fork can outrun. Never as root."""
    try:
        os.kill(-1, 9)
    except ProcessLookupError:
        return


def drop_capabilities() -> None:
    """Takes from an agent that stays root its rights over other users' files, over processes and over the machine.

    Raises: OSError: the kernel refuses
    """
    header = struct.pack("=Ii", CAPABILITY_VERSION_3, 0)
    check(_libc.capset(header, bytes(24)), "capset")


def landlock_abi() -> int:
    """Version of Landlock that this kernel speaks; 0 where it is absent or switched off."""
    return max(0, int(_libc.syscall(LANDLOCK_CREATE_RULESET, None, 0, LANDLOCK_CREATE_RULESET_VERSION)))


def landlock_ruleset(sandbox: Sandbox) -> int:
    """A descriptor of rules: every path but the hidden ones; no signal or ptrace to processes outside.

    Nothing in `/proc` can be written: an agent that lowers its `oom_score_adj` would let the kernel end the platform
    in its place.

    Landlock only allows, and a right on a folder holds for everything below. So the rules allow every sibling along
    the way to a hidden folder, and not the folders on that way. Names may be listed everywhere.

    Raises: OSError: there is no Landlock
    """
    abi = landlock_abi()
    handled = (1 << 13) - 1 & ~READ_DIR | REFER | (TRUNCATE if abi >= 3 else 0)
    scoped = SCOPE_ABSTRACT_UNIX_SOCKET | SCOPE_SIGNAL if abi >= SIGNAL_LANDLOCK else 0
    attributes = struct.pack("QQQ", handled, 0, scoped)[: 24 if abi >= SIGNAL_LANDLOCK else 8]
    ruleset = check(
        _libc.syscall(LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0),
        "landlock_create_ruleset",
    )
    hidden, writable = (
        [path for path in sandbox["hidden"] if not _is_covered(path, sandbox["view"])],
        sandbox["writable"],
    )
    for path in _siblings("/", [*hidden, "/proc"]):
        _allow(ruleset, path, handled if writable is None else EXECUTE | READ_FILE)
    for folder in writable or ():
        for path in _siblings(folder, hidden):
            _allow(ruleset, path, handled)
    _allow(ruleset, "/proc", EXECUTE | READ_FILE)
    _allow(ruleset, sandbox["visible"], handled)
    return ruleset


def _is_covered(path: str, view: View | None) -> bool:
    """Whether one of the program's own folders, its /tmp, say, lies over the path: the program never sees the path."""
    if view is None or not path.startswith(tuple(f"{folder}/" for folder in COVERED)):
        return False
    return not any(f"{path}/".startswith(f"{shared}/") for shared in view["shared"])


def _siblings(folder: str, hidden: list[str]) -> list[str]:
    """The folder; or, with something hidden below, everything else in it and in the folders on the way there."""
    if folder in hidden:
        return []
    start = folder.rstrip("/") + "/"
    below = {path[len(start) :].split("/")[0] for path in hidden if path.startswith(start)}
    if not below:
        return [folder]
    try:
        with os.scandir(folder) as entries:
            # A rule on the target, not one on the link, decides whether the link leads anywhere.
            below |= {entry.name for entry in entries if not entry.is_symlink()}
    except PermissionError:
        # This user may pass the folder and not list it: the hidden path itself names the way.
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
    check(_libc.syscall(LANDLOCK_ADD_RULE, ruleset, LANDLOCK_RULE_PATH_BENEATH, rule, 0), f"landlock_add_rule {path}")
    os.close(descriptor)
