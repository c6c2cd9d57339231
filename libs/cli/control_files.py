"""Requests of other commands to a running supervisor, as files in its home that only the owner can write.

A command writes a request file. The supervisor polls for it, removes it, and appends one line to the progress file at
every stage; the last line is `ended`. The command reads the progress file and removes it.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from leyden.libs.cli.record import write_private

FOLDER = "requests"
POLL_SECONDS = 0.05


class RestartRequest(BaseModel):
    """Services to restart, one after another."""

    model_config = ConfigDict(frozen=True)

    id: str
    services: list[str]


class Progress(BaseModel):
    """One stage of a restart; `ended` is the last one and names no service."""

    model_config = ConfigDict(frozen=True)

    state: Literal["starting", "finishing", "done", "failed", "ended"]
    service: str = ""
    detail: str = ""


def submit(home: Path, services: Sequence[str]) -> RestartRequest:
    """Asks the supervisor of a home to restart services."""
    request = RestartRequest(id=f"{time.time_ns():020d}-{secrets.token_hex(4)}", services=list(services))
    (home / FOLDER).mkdir(exist_ok=True, mode=0o700)
    _progress_file(home, request).touch(mode=0o600)
    write_private(home / FOLDER / f"{request.id}.json", request.model_dump_json())
    return request


def follow(home: Path, request: RestartRequest, is_alive: Callable[[], bool]) -> Iterator[Progress]:
    """Yields every stage but `ended`, until the request has ended.

    Args:   is_alive: whether the supervisor still runs
    Raises: EOFError: the supervisor ended first
    """
    path = _progress_file(home, request)
    try:
        with path.open() as file:
            while True:
                alive = is_alive()
                if line := file.readline():
                    progress = Progress.model_validate_json(line)
                    if progress.state == "ended":
                        return
                    yield progress
                elif not alive or not path.exists():
                    raise EOFError("the platform ended before the restart did")
                else:
                    time.sleep(POLL_SECONDS)
    finally:
        path.unlink(missing_ok=True)


def clear(home: Path) -> None:
    """Removes the requests to an earlier supervisor."""
    shutil.rmtree(home / FOLDER, ignore_errors=True)
    (home / FOLDER).mkdir(mode=0o700)


def pop(home: Path) -> RestartRequest | None:
    """Removes and returns the oldest request; None when there is none."""
    for path in sorted((home / FOLDER).glob("[0-9]*.json")):
        text = path.read_bytes()
        path.unlink()
        try:
            return RestartRequest.model_validate_json(text)
        except ValidationError:
            # A command of another version wrote it, and follows another format.
            continue
    return None


def report(home: Path, request: RestartRequest, progress: Progress) -> None:
    """Appends a stage for the command that follows."""
    with _progress_file(home, request).open("a") as file:
        file.write(progress.model_dump_json() + "\n")


def _progress_file(home: Path, request: RestartRequest) -> Path:
    return home / FOLDER / f"{request.id}.progress"
