"""The Postgres of a benchmark: durable, on the disk, and with its CPU time."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from leyden.libs.embedded.servers import EmbeddedPostgres
from leyden.libs.store.migrate import migrate


@dataclass(frozen=True)
class Stored:
    """A migrated database on a server of its own."""

    dsn: str
    postmaster: int

    def cpu_seconds(self) -> float:
        """User and system time of the server so far, of backends that have ended too."""
        children = Path(f"/proc/{self.postmaster}/task/{self.postmaster}/children").read_text().split()
        fields = Path(f"/proc/{self.postmaster}/stat").read_text().rpartition(")")[2].split()
        ended = (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")
        return ended + sum(map(process_seconds, [self.postmaster, *map(int, children)]))


def process_seconds(pid: int) -> float:
    """User and system time of a process so far, to the nanosecond; 0 when it has ended."""
    nanoseconds = 0
    with suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            nanoseconds += int((thread / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9


@contextmanager
def stored() -> Iterator[Stored]:
    """A server inside the block."""
    with tempfile.TemporaryDirectory(prefix="bench-postgres-") as folder:
        server = EmbeddedPostgres(Path(folder))
        dsn = server.start()
        try:
            migrate(dsn)
            yield Stored(dsn, int((server.data / "postmaster.pid").read_text().split()[0]))
        finally:
            server.stop()
