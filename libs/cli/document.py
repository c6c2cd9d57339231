"""A run's document from a JSON or TOML file and `--set path=value` options."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from leyden.libs.cli.errors import CommandError, Exit
from leyden.libs.contracts.api.problems import field_problem
from leyden.libs.contracts.config import Reward
from leyden.libs.contracts.strict import read_json

Document = dict[str, Any]


def read_document(path: Path, changes: Sequence[str] = ()) -> Document:
    """The document of a file with changes laid over it; the API validates it.

    A relative `directory` of an agent, and a relative `model` that exists, are resolved from the file's folder, because
    the platform needs absolute ones.

    Raises: CommandError: the file is not readable, or a change is not `path=value`
    """
    try:
        content = path.read_bytes()
        document = tomllib.loads(content.decode()) if path.suffix == ".toml" else read_json(content)
    except (OSError, ValueError) as error:
        raise CommandError(f"{path}: {error}; write a JSON or TOML file", Exit.USAGE) from None
    except RecursionError:
        raise CommandError(f"{path}: nested too deeply: flatten it", Exit.USAGE) from None
    if not isinstance(document, dict):
        raise CommandError(f"{path}: a run is one JSON object", Exit.USAGE)
    set_values(document, changes)
    try:
        # JSON has no dates and no infinities; TOML has.
        read_json(json.dumps(document).encode())
    except (TypeError, ValueError) as error:
        raise CommandError(f"{path}: {error}", Exit.USAGE) from None
    agents = document.get("agents")
    for agent in [document.get("agent"), *(agents if isinstance(agents, list) else [])]:
        if isinstance(agent, dict) and isinstance(agent.get("directory"), str):
            agent["directory"] = str((path.parent / agent["directory"]).resolve())
    model = document.get("model")
    if isinstance(model, str) and (path.parent / model).is_dir():
        document["model"] = str((path.parent / model).resolve())
    return document


def set_values(document: Document, changes: Sequence[str]) -> Document:
    """Lays `path=value` changes over a document, and returns it.

    Raises: CommandError: a change is not `path=value`
    """
    for change in changes:
        _set(document, change)
    return document


def _set(document: Document, change: str) -> None:
    """`sampling.group_size=4`; the value is JSON if it parses, else text. `credit.air=null` unsets."""
    path, separator, text = change.partition("=")
    *parents, name = path.split(".")
    if not separator or not all([*parents, name]):
        raise CommandError(f"--set {change!r} is not PATH=VALUE: write --set training.steps=10", Exit.USAGE)
    section = document
    for parent in parents:
        below = section.setdefault(parent, {})
        if not isinstance(below, dict):
            raise CommandError(f"--set {change!r}: {parent!r} is not an object in the document", Exit.USAGE)
        section = below
    try:
        section[name] = json.loads(text)
    except (ValueError, RecursionError):
        section[name] = text


def reward_of(file: Path, changes: list[str] | None) -> Reward:
    """Returns the section of a run's document. Raises: CommandError"""
    document = read_document(file, changes or [])
    if "reward" not in document:
        raise CommandError(f"{file} has no section reward: name its components there", Exit.USAGE)
    try:
        return Reward.model_validate(document["reward"])
    except ValidationError as error:
        found = [field_problem(Reward, one["loc"], one["type"], one["msg"]) for one in error.errors()]
        raise CommandError("; ".join(f"reward.{one.path}: {one.message}" for one in found), Exit.USAGE) from None
