"""The description of one program that runs on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Program:
    """One program.

    Args: name: unique among living ones, fit for a file name; command: program and arguments, no shell, `{python}` as
        first word for the place's interpreter; environment: complete but for PATH, HOME, TMPDIR and
        `document_variable`, which names the file with the document; document_on_stdin: the program reads it from
        stdin, too; document_name: one more file with it, in the working folder; directory: a folder that is copied
        into the working folder; cpu_seconds: of each process; network: whether it may open sockets; result: a file of
        the working folder, which is removed before the start and read at the end; artifacts: patterns of files of the
        working folder that are read at the end; files: contents by their paths in a folder beside the working folder,
        which `files_variable` names; None: no such folder
    """

    name: str
    command: list[str]
    environment: Mapping[str, str]
    document: Mapping[str, Any]
    document_variable: str
    timeout_seconds: float
    output_bytes: int
    memory_bytes: int | None = None
    cpu_seconds: int | None = None
    document_on_stdin: bool = False
    document_name: str | None = None
    directory: str | None = None
    network: bool = True
    result: str | None = None
    artifacts: Sequence[str] = ()
    files: Mapping[str, bytes] | None = None
    files_variable: str | None = None
