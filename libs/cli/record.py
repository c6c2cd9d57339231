"""`platform.json`: what a supervisor did, for other commands and for the supervisor that comes after a kill."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

FILE = "platform.json"


class Process(BaseModel):
    """A process, told from a later one of the same pid by when it started."""

    model_config = ConfigDict(frozen=True)

    pid: int
    started_ticks: int
    """Field 22 of /proc/PID/stat; 0 where there is no /proc."""

    def lives(self) -> bool:
        """Whether it is this very process, and no zombie."""
        return started_ticks(self.pid) == self.started_ticks


class ServiceRecord(BaseModel):
    """One service as the supervisor last saw it."""

    model_config = ConfigDict(frozen=True)

    url: str | None
    """Its door; workers have none."""
    internal_url: str
    """Where it tells of its health."""
    process: Process | None
    restarts: int


class PlatformRecord(BaseModel):
    """A platform in its home; addresses are empty until its servers have started."""

    model_config = ConfigDict(frozen=True)

    state: Literal["starting", "ready", "stopping", "stopped"]
    supervisor: Process
    embedded: list[str]
    """Which of postgres and redis run in the home."""
    services: dict[str, ServiceRecord] = {}
    database_url: str = ""
    redis_url: str = ""
    model_path: str = ""

    def running(self) -> bool:
        """Whether its supervisor lives."""
        return self.state != "stopped" and self.supervisor.lives()

    @property
    def url(self) -> str | None:
        """Address of the API, once it is known."""
        return self.services["api"].url if "api" in self.services else None


def read_record(home: Path) -> PlatformRecord | None:
    """The record in a home; None when there is none, or it is of an incompatible version."""
    try:
        return PlatformRecord.model_validate_json((home / FILE).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def write_record(home: Path, record: PlatformRecord) -> None:
    """Replaces the record in one move; it holds addresses with passwords, so only its owner may read it."""
    write_private(home / FILE, record.model_dump_json(indent=1) + "\n")


def write_private(path: Path, content: str) -> None:
    """Writes a file in one move, readable by its owner alone."""
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(content)
    scratch.replace(path)


def process(pid: int) -> Process:
    """The process that has this pid now."""
    return Process(pid=pid, started_ticks=started_ticks(pid) or 0)


def started_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when there is none, 0 where it cannot be told."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None if Path("/proc/self").exists() or not _answers(pid) else 0
    # The program's name, which may hold anything, ends at the last parenthesis.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in {"Z", "X"} else int(fields[19])


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
