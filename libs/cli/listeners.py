"""The sockets that services listen on. The supervisor owns them, so that they outlive every process.

While a service is being started again, or replaced, its connections wait in the kernel until a process accepts them:
nobody is refused.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from leyden.libs.cli.record import PlatformRecord
from leyden.libs.cli.services import INTERNAL_PORTS, PORTS

BACKLOG = 2048


@dataclass(frozen=True)
class Listeners:
    """The sockets of one service."""

    door: socket.socket | None
    """None for a worker, which nobody asks for anything."""
    internal: socket.socket

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What a process of the service must inherit."""
        return tuple(sock.fileno() for sock in (self.door, self.internal) if sock is not None)

    def environment(self, service: str) -> dict[str, str]:
        """The variables that tell a process where they are."""
        prefix = service.upper()
        door = {} if self.door is None else {f"{prefix}_LISTEN_FD": str(self.door.fileno())}
        return door | {f"{prefix}_INTERNAL_FD": str(self.internal.fileno())}

    def close(self) -> None:
        """Refuses whoever comes from now on."""
        for sock in (self.door, self.internal):
            if sock is not None:
                sock.close()


def open_listeners(services: Iterable[str], last: PlatformRecord | None, *, free: bool) -> dict[str, Listeners]:
    """Listens for each service: on the port of the last start, else on the preferred one, else on any free one.

    Args: free: whether any free ports will do at once, for platforms beside each other
    """
    opened: dict[str, Listeners] = {}
    with contextlib.ExitStack() as undo:
        for service in services:
            before = last.services.get(service) if last else None
            door = _listen(before.url if before else None, PORTS, service, free) if service in PORTS else None
            internal = _listen(before.internal_url if before else None, INTERNAL_PORTS, service, free)
            opened[service] = Listeners(door, internal)
            undo.callback(opened[service].close)
        undo.pop_all()
    return opened


def _listen(before: str | None, preferred: Mapping[str, int], service: str, free: bool) -> socket.socket:
    candidates = [int(before.rpartition(":")[2])] if before else []
    candidates += [] if free else [preferred[service]]
    for port in candidates:
        with contextlib.suppress(OSError):
            return _bound(port)
    return _bound(0)


def _bound(port: int) -> socket.socket:
    sock = socket.socket()
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock
