"""A run's document out of a JSON or TOML file and `--set path=value` options."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leyden.libs.cli.errors import CommandError, Exit
from leyden.libs.contracts.strict import read_json

Document = dict[str, Any]


def read_document(path: Path, changes: Sequence[str] = ()) -> Document:
    """The document of a file with changes laid over it; the API checks what it says.

    A relative `agent.directory` is taken from the file's folder, since the runner needs an absolute one.

    Raises: CommandError: not readable, or a change is not `path=value`
    """
    document = _parse(path)
    for change in changes:
        _set(document, change)
    _check(path, document)
    agent = document.get("agent")
    if isinstance(agent, dict) and isinstance(agent.get("directory"), str):
        agent["directory"] = str((path.parent / agent["directory"]).resolve())
    return document


def _parse(path: Path) -> Document:
    try:
        content = path.read_bytes()
        document = tomllib.loads(content.decode()) if path.suffix == ".toml" else read_json(content)
    except (OSError, ValueError) as error:
        raise CommandError(f"{path}: {error}; write a JSON or TOML file", Exit.USAGE) from None
    except RecursionError:
        raise CommandError(f"{path}: nested too deeply to be read: flatten it", Exit.USAGE) from None
    if not isinstance(document, dict):
        raise CommandError(f"{path}: a run is one JSON object", Exit.USAGE)
    return document


def _check(path: Path, document: Document) -> None:
    """Raises: CommandError: the document holds what JSON cannot say, such as a date or an infinity of TOML"""
    try:
        read_json(json.dumps(document).encode())
    except (TypeError, ValueError) as error:
        raise CommandError(f"{path}: {error}", Exit.USAGE) from None


def _set(document: Document, change: str) -> None:
    """`sampling.group_size=4`; the value is JSON where it parses, else text. `credit.air=null` unsets."""
    path, separator, text = change.partition("=")
    *folders, name = path.split(".")
    if not separator or not all([*folders, name]):
        raise CommandError(f"--set {change!r} is not PATH=VALUE: write --set training.steps=10", Exit.USAGE)
    place = document
    for folder in folders:
        below = place.setdefault(folder, {})
        if not isinstance(below, dict):
            raise CommandError(f"--set {change!r}: {folder!r} is not an object in the document", Exit.USAGE)
        place = below
    try:
        place[name] = json.loads(text)
    except (ValueError, RecursionError):
        place[name] = text
