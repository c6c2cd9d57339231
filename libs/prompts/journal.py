"""The file that an optimisation goes on from: JSON lines, each durable before what follows from it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leyden.libs.prompts.errors import PromptError

FILE = "journal.jsonl"
Json = dict[str, Any]


class Journal:
    """The lines of one optimisation, by kind and key; the last one of a key counts.

    Args: settings: all that GEPA's decisions follow from, beside rewards and rewritten prompts; None for those of the
        journal that is there

    Raises: PromptError: the folder has the journal of other settings, or none, or another process has it
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any] | None) -> None:
        if settings is None and not (folder / FILE).is_file():
            raise PromptError(f"{folder} has no {FILE}: name the folder of an optimisation")
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / FILE
        self._found: dict[tuple[str, str], Any] = {}
        self._file = self._path.open("ab")
        try:
            self._lock()
            self.id = self._begin(None if settings is None else digest_of(settings))
            """A prefix of idempotency keys."""
        except PromptError:
            self._file.close()
            raise

    def _begin(self, settings: str | None) -> str:
        whole = self._read()
        begun = self.get("begun", "")
        # A killed process leaves the beginning of a line.
        self._file.truncate(whole)
        if begun is None:
            begun = {"id": secrets.token_hex(8), "settings": settings}
            self.add("begun", "", begun)
        if settings not in {None, begun["settings"]}:
            raise PromptError(
                f"{self._path} is of another document, prompt or seed: name another folder with --to, or delete it"
            )
        return str(begun["id"])

    def _lock(self) -> None:
        """Keeps a second writer out, until the process ends."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PromptError(f"another process works in {self._path.parent}: wait for it, or stop it") from None

    def _read(self) -> int:
        """Reads the whole lines; returns their bytes."""
        content = self._path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        for line in whole.splitlines():
            kind, key, value = json.loads(line)
            self._found[kind, key] = value
        return len(whole)

    def get(self, kind: str, key: str) -> Any:
        """Returns the value of a key; None where it has none."""
        return self._found.get((kind, key))

    def all(self, kind: str) -> dict[str, Any]:
        """Returns all values of a kind by key, in the order of their first lines."""
        return {key: value for (one, key), value in self._found.items() if one == kind}

    def add(self, kind: str, key: str, value: Any) -> None:
        """Adds a line, and returns once it is on the disk."""
        self._file.write(json.dumps([kind, key, value]).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._found[kind, key] = value

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def remove(self) -> None:
        """Removes the file: the next optimisation in the folder begins anew."""
        self._path.unlink()


def digest_of(value: Any) -> str:
    """32 hex digits that name a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]
