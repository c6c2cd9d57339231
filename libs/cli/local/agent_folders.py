"""The folders that `leyden up --agents` and `--graders` name: services, perhaps root, copy code from them."""

from __future__ import annotations

import pwd
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from leyden.libs.cli.errors import CommandError, Exit

FIRST_PERSON = 1000
"""The lowest user id of people; root counts as one, too."""


def code_folders(named: Iterable[Path], option: Literal["--agents", "--graders"]) -> tuple[Path, ...]:
    """The folders that an option names, absolute and without links.

    Raises: CommandError: one is no folder, or has somebody's home in it, and with it their keys
    """
    folders = tuple(path.expanduser().resolve() for path in named)
    for folder in folders:
        if not folder.is_dir():
            raise CommandError(f"{option} {folder}: there is no such folder", Exit.USAGE)
        home = next((home for home in _homes() if home.is_relative_to(folder)), None)
        if home is not None:
            held = "is the home" if home == folder else f"holds the home {home}"
            whose = option.removeprefix("--")
            raise CommandError(f"{option} {folder} {held} of a user: name the {whose}' own folder in it", Exit.USAGE)
    return folders


def check_apart(agents: Iterable[Path], graders: Iterable[Path]) -> None:
    """Passes folders of graders that hold no agents: the platform hides them from agents.

    Raises: CommandError
    """
    for agent in agents:
        if above := next((folder for folder in graders if agent.is_relative_to(folder)), None):
            raise CommandError(
                f"--graders {above} holds --agents {agent}, and agents may not read what graders know: name folders"
                " beside each other",
                Exit.USAGE,
            )


def _homes() -> list[Path]:
    people = [one.pw_dir for one in pwd.getpwall() if one.pw_uid == 0 or one.pw_uid >= FIRST_PERSON]
    # System users such as nobody have no home, or `/`.
    return [Path.home().resolve(), *(Path(home).resolve() for home in people if home != "/" and Path(home).is_dir())]
