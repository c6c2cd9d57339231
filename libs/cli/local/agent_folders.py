"""The folders of agents that `leyden up --agents` names: the runner, perhaps root, copies from them for agents."""

from __future__ import annotations

import pwd
from collections.abc import Iterable
from pathlib import Path

from leyden.libs.cli.errors import CommandError, Exit

FIRST_PERSON = 1000
"""The lowest user id of people; root counts as one, too."""


def agent_folders(named: Iterable[Path]) -> tuple[Path, ...]:
    """The folders, absolute and without links.

    Raises: CommandError: one is no folder, or has somebody's home in it, and with it their keys
    """
    folders = tuple(path.expanduser().resolve() for path in named)
    for folder in folders:
        if not folder.is_dir():
            raise CommandError(f"--agents {folder}: there is no such folder", Exit.USAGE)
        home = next((home for home in _homes() if home.is_relative_to(folder)), None)
        if home is not None:
            held = "is the home" if home == folder else f"holds the home {home}"
            raise CommandError(f"--agents {folder} {held} of a user: name the agents' own folder in it", Exit.USAGE)
    return folders


def _homes() -> list[Path]:
    people = [one.pw_dir for one in pwd.getpwall() if one.pw_uid == 0 or one.pw_uid >= FIRST_PERSON]
    # System users such as nobody have no home, or `/`.
    return [Path.home().resolve(), *(Path(home).resolve() for home in people if home != "/" and Path(home).is_dir())]
