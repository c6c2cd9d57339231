"""`platform.json`: the state of a platform, for other commands and for the next supervisor of the same home."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

FILE = "platform.json"


class Process(BaseModel):
    """A process by its pid and start time, so that a later process with the same pid is another one."""

    model_config = ConfigDict(frozen=True)

    pid: int
    started_ticks: int
    """Field 22 of /proc/PID/stat; 0 where there is no /proc."""

    def is_alive(self) -> bool:
        """Whether this very process runs and is no zombie."""
        return started_ticks(self.pid) == self.started_ticks


class ServiceRecord(BaseModel):
    """One service at the supervisor's last poll."""

    model_config = ConfigDict(frozen=True)

    url: str | None
    """Null for a worker, which has no endpoint."""
    internal_url: str
    """Health, readiness and metrics."""
    process: Process | None
    restarts: int


class PlatformRecord(BaseModel):
    """A platform in its home; addresses are empty until its servers have started."""

    model_config = ConfigDict(frozen=True)

    state: Literal["starting", "ready", "stopping", "stopped"]
    supervisor: Process
    embedded: list[str]
    """The servers among `postgres` and `redis` that run in the home."""
    services: dict[str, ServiceRecord] = {}
    database_url: str = ""
    redis_url: str = ""
    model_path: str = ""

    def is_running(self) -> bool:
        """Whether its supervisor runs."""
        return self.state != "stopped" and self.supervisor.is_alive()

    @property
    def url(self) -> str | None:
        """Address of the API, once it has one."""
        return self.services["api"].url if "api" in self.services else None


def read_record(home: Path) -> PlatformRecord | None:
    """The record in a home; None when there is none, or an incompatible version wrote it."""
    try:
        return PlatformRecord.model_validate_json((home / FILE).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def write_record(home: Path, record: PlatformRecord) -> None:
    """Replaces the record atomically; only its owner may read it, because its addresses contain passwords."""
    write_private(home / FILE, record.model_dump_json(indent=1) + "\n")


def write_private(path: Path, content: str) -> None:
    """Writes a file atomically, readable by its owner alone."""
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(content)
        scratch.replace(path)
    except OSError:
        scratch.unlink()
        raise


def process(pid: int) -> Process:
    """The process that has this pid now."""
    return Process(pid=pid, started_ticks=started_ticks(pid) or 0)


def started_ticks(pid: int) -> int | None:
    """Start of a process in clock ticks since boot; None when it does not run, 0 where there is no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None if Path("/proc/self").exists() or not _exists(pid) else 0
    # The program's name may contain anything; it ends at the last parenthesis.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in {"Z", "X"} else int(fields[19])


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
