"""One service that the supervisor keeps running: its process, and its next one after a crash."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable

from leyden.libs.cli.local.fork_server import ForkedProcess
from leyden.libs.cli.local.record import Process, process
from leyden.libs.cli.local.services import KILL_SECONDS

FIRST_BACKOFF_SECONDS = 0.2
MAX_BACKOFF_SECONDS = 10.0
STEADY_SECONDS = 30.0
"""A process that ran for this long starts again after the first backoff."""
ENGINE_READY_SECONDS = 900.0
"""Bound on the time until an engine is ready, which may load a large model."""


class ServiceProcess:
    """A process of a service, and the readiness that it reports over a pipe: a line of JSON at each change.

    Args: pipe: the reading end, owned by this object
    """

    def __init__(self, popen: subprocess.Popen[bytes] | ForkedProcess, pipe: int) -> None:
        self.popen = popen
        self.identity: Process = process(popen.pid)
        self.started = time.monotonic()
        self.is_ready = False
        self._problem = "not started yet"
        self._unread = b""
        self._pipe: int | None = pipe
        os.set_blocking(pipe, False)

    def poll(self) -> int | None:
        """Reads the pipe; returns the exit status, or None while the process runs."""
        if self._pipe is not None:
            self._read(self._pipe)
        status = self.popen.poll()
        if status is not None:
            self._close()
        return status

    def problem(self) -> str:
        """The reason why it cannot work yet; empty when it can."""
        return self._problem if self.poll() is None else "its process has ended"

    def kill(self) -> None:
        """Sends SIGKILL and waits for the end."""
        self.popen.kill()
        self.popen.wait()
        self._close()

    def _read(self, pipe: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(pipe, 65536):
                self._unread += chunk
            # The other end is closed: the process is ready or dead, and reports nothing more.
            self._close()
        *lines, self._unread = self._unread.split(b"\n")
        if lines:
            checks: dict[str, str] = json.loads(lines[-1])
            failing = [f"{check} {result}" for check, result in checks.items() if result != "ok"]
            self.is_ready, self._problem = not failing, ", ".join(failing)

    def _close(self) -> None:
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None


class ManagedService:
    """A service. All of it runs in the supervising thread, because its processes die with the thread that started them.

    Args: spawn: starts a process of the service; report: receives a few words about each event;
        restart: whether the service starts again after a crash
    """

    def __init__(
        self, name: str, spawn: Callable[[str], ServiceProcess], report: Callable[[str], None], *, restart: bool
    ) -> None:
        self.name = name
        self.current: ServiceProcess | None = None
        self.identity: Process | None = None
        self.restarts = 0
        self._spawn = spawn
        self._report = report
        self._restart = restart
        self._backoff = FIRST_BACKOFF_SECONDS
        self._start_at = 0.0

    def problem(self) -> str:
        """The reason why it cannot work yet; empty when it can."""
        return "its process has ended" if self.current is None else self.current.problem()

    def poll(self, now: float) -> bool:
        """Handles a crash and starts the process when it is due; returns whether anything changed."""
        changed = False
        if self.current is not None and (status := self.current.poll()) is not None:
            self._handle_crash(self.current, status, now)
            changed = True
        if self.current is None and now >= self._start_at and (self._restart or self.identity is None):
            self.current = self._spawn(self.name)
            self.identity = self.current.identity
            changed = True
        return changed

    def _handle_crash(self, crashed: ServiceProcess, status: int, now: float) -> None:
        self._report(f"{self.name} ended ({ending(status)})")
        if now - crashed.started > STEADY_SECONDS:
            self._backoff = FIRST_BACKOFF_SECONDS
        self.current = None
        self._start_at = now + self._backoff
        self._backoff = min(MAX_BACKOFF_SECONDS, self._backoff * 2)
        self.restarts += 1


class Termination:
    """Ends processes: SIGTERM, after `hurry_seconds` a second SIGTERM, after some seconds more SIGKILL."""

    def __init__(self, processes: list[ServiceProcess], *, hurry_seconds: float) -> None:
        self._processes = processes
        now = time.monotonic()
        self._signals = [
            (now, signal.SIGTERM),
            (now + hurry_seconds, signal.SIGTERM),
            (now + hurry_seconds + KILL_SECONDS, signal.SIGKILL),
        ]

    def is_over(self, *, kill: bool = False) -> bool:
        """Sends the signals that are due and returns whether all processes have ended.

        Args: kill: SIGKILL now
        """
        running = [one for one in self._processes if one.poll() is None]
        due = [number for when, number in self._signals if kill or time.monotonic() >= when]
        self._signals = self._signals[len(due) :]
        for one in running:
            for number in due[-1:]:
                one.popen.send_signal(number)
        return not running


def ending(status: int) -> str:
    """An exit status in words."""
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
