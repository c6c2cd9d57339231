"""Runs a program on a machine as users have it; the tests themselves may run as root from a home closed to others.

A mount namespace shows the interpreter, the repository and one folder even below folders that other users cannot pass.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from leyden.libs.sandbox.users import closed_to

ROOT = Path(__file__).resolve().parents[2]
UID = 1_800_000_000
_ENTER = """
import ctypes, json, os, sys
uid, covers, shows = json.loads(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
def call(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
def mount(source, target, kind, flags, options=None):
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, options)]
    call(libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]))
if covers:
    NEW_NAMESPACE, BIND, PRIVATE_ALL = 0x20000, 4096, 0x44000
    call(libc.unshare(NEW_NAMESPACE))
    mount(None, "/", None, PRIVATE_ALL)
    sources = [os.open(path, os.O_PATH) for path in shows]
    umask = os.umask(0)
    for path in covers:
        mount("tmpfs", path, "tmpfs", 0, "mode=0711")
    for path, source in zip(shows, sources):
        os.makedirs(path, mode=0o711, exist_ok=True)
        mount(f"/proc/self/fd/{source}", path, None, BIND)
    os.umask(umask)
if uid is not None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
os.chdir(sys.argv[2])
os.execv(sys.argv[3], sys.argv[3:])
"""


def as_ordinary_user(folder: Path) -> tuple[str, ...]:
    """The first words of a command: this interpreter, of an ordinary user who owns the folder and all in it.

    Where the tests run as an ordinary user already, that is this interpreter alone.
    """
    if os.geteuid() != 0:
        return (sys.executable,)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, UID, UID, follow_symlinks=False)
    return _launcher(folder, UID)


def as_root_whose_interpreter_is_open(folder: Path) -> tuple[str, ...]:
    """The first words of a command: this interpreter, of root, where every user can pass to it and to the folder."""
    folder.chmod(0o755)
    return _launcher(folder, None)


def _launcher(folder: Path, uid: int | None) -> tuple[str, ...]:
    needed = [*dict.fromkeys(map(str, (ROOT, sys.prefix, sys.base_prefix, Path(sys.base_prefix).resolve(), folder)))]
    closed = {path: closed_to(UID, [path]) for path in needed}
    shows = [path for path in needed if closed[path] is not None]
    covers = sorted({cover for cover in closed.values() if cover is not None})
    view = json.dumps([uid, covers, shows])
    return (sys.executable, "-I", "-S", "-c", _ENTER, view, str(ROOT), sys.executable)
