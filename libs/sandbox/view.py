"""The files of the machine as one program sees them: its workspace at one path; /tmp, /var/tmp and /dev/shm of its own.

The supervisor's child makes this view between `fork` and `exec`, with the standard library alone. It is a root folder
in memory with the machine's folders mounted in it, and belongs to the program's processes: it ends with the last one.
"""
# pathlib costs more start-up time than everything else here:
# ruff: noqa: PTH101, PTH102, PTH110, PTH112, PTH114, PTH115, PTH120, PTH123, PTH208, PTH211

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
        `/`; `temporary` and `lasting`: the folders that are its /tmp and /var/tmp; `memory_bytes`: bounds the
        size of its /dev/shm, which is 1 GiB at most; `shared`: paths in the machine's folders of these names that
        it sees, too; `room`: a folder of the machine where the view is built; `as_user`: in a user namespace, which
        needs no rights and which has this process's user alone.
        """

        workspace: str
        place: str
        temporary: str
        lasting: str
        memory_bytes: int | None
        shared: list[str]
        room: str
        as_user: bool


TMP, VAR_TMP, SHM = "/tmp", "/var/tmp", "/dev/shm"  # noqa: S108  # each program has others
COVERED = (TMP, VAR_TMP, SHM)
"""The folders of the machine in which every user may write."""
SHM_BYTES = 1 << 30
"""The most that a program may keep in its /dev/shm: memory that counts as no process's."""
CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
MS_NOSUID, MS_NODEV = 1 << 1, 1 << 2
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
    _cover(root, view)
    _mount_workspace(root, view["workspace"], view["place"])
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


def _cover(root: str, view: View) -> None:
    """Lays the program's own folders over those of every user; one that is a link leads to another of them."""
    for place, own in ((TMP, view["temporary"]), (VAR_TMP, view["lasting"]), (SHM, None)):
        if os.path.realpath(place) != place or not os.path.isdir(root + place):
            continue
        if own is not None:
            _mount(own, root + place, MS_BIND)
            continue
        size = min(view["memory_bytes"] or SHM_BYTES, SHM_BYTES)
        _mount("tmpfs", root + place, MS_NOSUID | MS_NODEV, "tmpfs", f"mode=1777,size={size}".encode())
    for path in view["shared"]:
        if not os.path.lexists(root + path):
            _add(root, path)


def _mount_workspace(root: str, workspace: str, place: str) -> None:
    """Mounts the workspace at its place. Folders above that are not there, as below its own /tmp, hold nothing else."""
    made: list[str] = []
    path = root + place
    while not os.path.lexists(path):
        made.insert(0, path)
        path = os.path.dirname(path)
    for path in made:
        os.mkdir(path)
        # Every user passes, whatever the umask.
        os.chmod(path, 0o755)  # noqa: S103  # they hold nothing else
        if path == made[0] and len(made) > 1:
            _mount("tmpfs", path, MS_NOSUID | MS_NODEV, "tmpfs", b"mode=0755")
    _mount(workspace, root + place, MS_BIND)
    if len(made) > 1:
        _mount(None, made[0], MS_REMOUNT | MS_BIND | MS_RDONLY)


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
