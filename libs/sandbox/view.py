"""The files of the machine as one program sees them: its workspace at one path, and a /tmp of its own.

The supervisor's child makes this view between `fork` and `exec`, with the standard library alone. It is a root folder
in memory with the machine's folders mounted in it, and belongs to the program's processes: it ends with the last one.
"""
# pathlib costs more start-up time than everything else here:
# ruff: noqa: PTH102, PTH110, PTH112, PTH114, PTH115, PTH123, PTH208, PTH211

from __future__ import annotations

import ctypes
import os

TYPE_CHECKING = False
"""mypy takes it for true. Importing `typing` costs a third of the start of a supervisor."""

if TYPE_CHECKING:
    from typing import TypedDict

    class View(TypedDict):
        """One view.

        `workspace`: the folder that the program finds at `place`, which is a folder of the machine or a new name in
        `/`; `temporary`: the folder that is its /tmp; `shared`: names in the machine's /tmp that it sees, too; `room`:
        a folder of the machine where the view is built; `as_user`: in a user namespace, which needs no rights and
        which has this process's user alone.
        """

        workspace: str
        place: str
        temporary: str
        shared: list[str]
        room: str
        as_user: bool


TMP = "/tmp"  # noqa: S108  # each program has another one
CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC = 1 << 0, 1 << 5, 1 << 12, 1 << 14
MS_UNBINDABLE, MS_PRIVATE, MNT_DETACH = 1 << 17, 1 << 18, 2

_libc = ctypes.CDLL(None, use_errno=True)


def show(view: View) -> None:
    """Gives this process, which has one thread, its view.

    Raises: OSError: the kernel refuses, or this process lacks CAP_SYS_ADMIN and the view is not `as_user`
    """
    user, group = os.geteuid(), os.getegid()
    check(_libc.unshare(CLONE_NEWNS | (CLONE_NEWUSER if view["as_user"] else 0)), "unshare")
    if view["as_user"]:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{user} {user} 1")
        _write("/proc/self/gid_map", f"{group} {group} 1")
    # No mount of this process reaches the machine.
    _mount(None, "/", MS_REC | MS_PRIVATE)
    root = view["room"]
    _mount("tmpfs", root, 0, "tmpfs", b"mode=0755")
    # Otherwise the folder of the machine that holds the new root would be copied with the root in it.
    _mount(None, root, MS_UNBINDABLE)
    for name in os.listdir("/"):
        _add(root, f"/{name}")
    if os.path.isdir(f"{root}{TMP}") and not os.path.islink(TMP):
        _cover_tmp(root, view)
    if not os.path.lexists(root + view["place"]):
        os.mkdir(root + view["place"], 0o755)
    _mount(view["workspace"], root + view["place"], MS_BIND)
    _enter(root)


def _add(root: str, path: str) -> None:
    """Adds a file of the machine to the new root: a link as a link, all else by a mount."""
    if os.path.islink(path):
        os.symlink(os.readlink(path), root + path)
        return
    if os.path.isdir(path):
        os.mkdir(root + path, 0o755)
    elif os.path.exists(path):
        os.close(os.open(root + path, os.O_CREAT | os.O_WRONLY, 0o644))
    else:
        # Gone since it was listed.
        return
    _mount(path, root + path, MS_BIND | MS_REC)


def _cover_tmp(root: str, view: View) -> None:
    _mount(view["temporary"], root + TMP, MS_BIND)
    for name in view["shared"]:
        _add(root, f"{TMP}/{name}")


def _enter(root: str) -> None:
    """Makes the new root that of this process, read-only itself, and lets go of the machine's."""
    os.chdir(root)
    check(_libc.pivot_root(b".", b"."), "pivot_root")
    check(_libc.umount2(b".", MNT_DETACH), "umount2")
    os.chdir("/")
    _mount(None, "/", MS_REMOUNT | MS_BIND | MS_RDONLY)


def _mount(source: str | None, target: str, flags: int, kind: str | None = None, options: bytes | None = None) -> None:
    words = [word and word.encode() for word in (source, target, kind)]
    check(_libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), options), f"mount {target}")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def check(result: int, what: str) -> int:
    """The result of a call of libc. Raises: OSError: it failed"""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
