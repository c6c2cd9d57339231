"""Runs a program as an ordinary user, as on a laptop, where the tests themselves may run as root."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from leyden.services.runner.cell import ROOT, closed_above, outermost, ways, within
from leyden.services.runner.walls import Walls

UID = 1_800_000_000
_BECOME = """
import json, os, sys
sys.path.append(sys.argv[1])
from leyden.services.runner.walls import close_in
close_in(json.loads(sys.argv[2]))
os.chdir(sys.argv[1])
os.execv(sys.argv[3], sys.argv[3:])
"""


def as_ordinary_user(folder: Path) -> tuple[str, ...]:
    """The first words of a command: this interpreter, of an ordinary user whose the folder and all in it becomes.

    Where the tests run as an ordinary user already, that is this interpreter alone.
    """
    if os.geteuid() != 0:
        return (sys.executable,)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, UID, UID, follow_symlinks=False)
    links, files = ways([sys.executable], os.defpath, str(folder))
    prefixes = [str(Path(path).parents[1]) for path in (*links, *files) if Path(path).parent.name == "bin"]
    needed = outermost([ROOT, *prefixes, str(folder)])
    closed = {closed_above(str(Path(path).parent), (UID, UID)) for path in needed} - {None}
    covers = outermost(filter(None, closed))
    walls = Walls(
        user=(UID, UID),
        own_user=False,
        covers=covers,
        links=[],
        shows=[(path, path == str(folder)) for path in needed if any(within(path, cover) for cover in covers)],
        own_processes=False,
        hidden=[],
        landlock=False,
    )
    return (sys.executable, "-I", "-S", "-c", _BECOME, ROOT, json.dumps(walls), sys.executable)
