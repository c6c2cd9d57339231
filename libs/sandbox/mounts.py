"""The mounts that this process may give to a program, and the paths that it finds by them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from leyden.libs.sandbox.view import COVERED

if TYPE_CHECKING:
    from leyden.libs.sandbox.view import View

WORK = Path("/work")
"""The path of each program's workspace, on a machine that has no such folder."""
_TRY = "import json, sys; from leyden.libs.sandbox.view import show; show(json.loads(sys.argv[1]))"

_CHARACTER = r"[^\s:;,=()'\"]"
"""A character of a path among the words of a text."""

Rights = Literal["mounts", "user"]
"""`mounts`: this process may mount, as root may unless its container forbids it. `user`: it may in a user namespace."""


def rights_to_show(room: Path, folder: Path, *, own_users: bool) -> Rights | None:
    """The rights by which a child of this process gets a view; None where the kernel or a container forbids it. Blocks.

    Args: room, folder: two empty folders; own_users: whether programs become other users, unknown in a user namespace
    """
    possible: tuple[Rights, ...] = ("mounts",) if own_users else ("mounts", "user")
    views = ((rights, view_of(folder, folder, folder, None, WORK, (), room, rights)) for rights in possible)
    return next((rights for rights, view in views if is_shown(view)), None)


def is_shown(view: View) -> bool:
    """Whether a child of this process can get the view. Blocks."""
    tried = subprocess.run([sys.executable, "-c", _TRY, json.dumps(view)], check=False, capture_output=True)
    return tried.returncode == 0


def place_of_workspaces(room: Path, work: Path = WORK) -> Path:
    """The path at which each program finds its workspace: `/work`; on a machine that has one, the folder `room`."""
    return room if os.path.lexists(work) else work


def view_of(
    workspace: Path,
    temporary: Path,
    lasting: Path,
    memory_bytes: int | None,
    place: Path,
    texts: Iterable[str],
    room: Path,
    rights: Rights,
) -> View:
    """The view of a program.

    Args: texts: those that may name files of the machine's /tmp, /var/tmp and /dev/shm, which it sees, too; others: as
        in `View`
    """
    return {
        "workspace": os.path.realpath(workspace),
        "place": str(place),
        "temporary": os.path.realpath(temporary),
        "lasting": os.path.realpath(lasting),
        "memory_bytes": memory_bytes,
        "shared": paths_in_covered(texts, but=str(place)),
        "room": os.path.realpath(room),
        "as_user": rights == "user",
    }


def texts_with_paths(command: Iterable[str], environment: Mapping[str, str]) -> list[str]:
    """The words of a command, and the variables that are a path or a list of paths."""
    return [*command, *(value for value in environment.values() if value.startswith("/"))]


def paths_in_covered(texts: Iterable[str], but: str = "") -> list[str]:
    """The files and folders in /tmp, /var/tmp and /dev/shm that texts name by their paths, or by paths below them.

    Args: but: a folder whose paths are left out; a program's workspace is mounted where they name it
    """
    # The folder itself may have a space in its name.
    own = rf"(?<!{_CHARACTER}){re.escape(but)}(/{_CHARACTER}*)?(?!{_CHARACTER})"
    others = [re.sub(own, "", text) if but else text for text in texts]
    words = [word for text in others for word in re.findall(f"{_CHARACTER}+", text)]
    named = {
        f"{folder}/{name}"
        for folder in COVERED
        for word in words
        if word.startswith(f"{folder}/")
        and (name := word.removeprefix(f"{folder}/").split("/")[0]) not in {"", ".", ".."}
    }
    return sorted(filter(os.path.lexists, named))
