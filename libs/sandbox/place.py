"""The place of programs on this machine, which a service's settings describe, and the names of these settings."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

UserRule = Literal["auto", "own", "same"]


@dataclass(frozen=True)
class Names:
    """Words of messages.

    Args: program: `agent`; prefix, kind: of settings, as in RUNNER_AGENT_USER; directory: the field of a document that
        names a folder to copy; remedy: the way to name such folders to the platform; memory: the field that limits it
    """

    program: str
    prefix: str
    kind: str
    directory: str
    remedy: str
    memory: str

    def setting(self, name: str) -> str:
        """`RUNNER_AGENT_` and the name."""
        return f"{self.prefix}_{self.kind}_{name}"


@dataclass(frozen=True)
class Place:
    """The bounds that all programs of a service share.

    Args: work_folder: parent of the fresh folders; hidden_paths: folders that no program may open; roots: folders below
        which a copied folder may lie; max_directory_bytes: of its files in sum; path: PATH of programs; python: the
        interpreter for `{python}`; user, uids_from: the rule for their users, and the first of 20,000 ids;
        grace_seconds: between SIGTERM at a timeout and SIGKILL
    """

    names: Names
    work_folder: Path
    hidden_paths: tuple[Path, ...] = ()
    roots: tuple[Path, ...] = ()
    max_directory_bytes: int = 2**30
    path: str = os.defpath
    python: str = sys.executable
    user: UserRule = "auto"
    uids_from: int | None = None
    max_open_files: int = 4096
    max_processes: int | None = 512
    max_file_bytes: int | None = 16 * 2**30
    grace_seconds: float = 5.0


def open_work_folder() -> Path:
    """A work folder that every user can pass to.

    Preferably not in /tmp: programs write there, and Landlock closes the folders directly above a hidden one.
    """
    lasting = Path("/var/tmp")  # noqa: S108  # `Workspaces` refuses a folder that others may write to
    parent = lasting if os.access(lasting, os.W_OK) else Path(tempfile.gettempdir())
    return parent / f"leyden-attempts-{os.getuid()}"
