"""One service that the supervisor keeps running: its process, restarts after a crash, and planned restarts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Literal

from leyden.libs.cli.record import Process, process
from leyden.libs.cli.services import KILL_SECONDS, RESTART_SECONDS

FIRST_BACKOFF_SECONDS = 0.2
MAX_BACKOFF_SECONDS = 10.0
STEADY_SECONDS = 30.0
"""A process that ran for this long starts again after the first backoff."""
READY_SECONDS = 120.0
"""Bound on the time until a successor is ready."""
ENGINE_READY_SECONDS = 900.0
"""The same for an engine, which may load a large model."""

ONE_AT_A_TIME = frozenset({"engine"})
"""Their successor starts after the old process has ended: memory may not hold two copies of the weights."""

Stage = Literal["starting", "finishing"]


class RestartFailed(Exception):
    """A service was not restarted; the message says why, and what runs now."""


class ServiceProcess:
    """A process of a service, and the readiness that it reports over a pipe: a line of JSON at each change.

    Args: pipe: the reading end, owned by this object
    """

    def __init__(self, popen: subprocess.Popen[bytes], pipe: int) -> None:
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
        self._successor: ServiceProcess | None = None
        self._leaving: ServiceProcess | None = None
        self._backoff = FIRST_BACKOFF_SECONDS
        self._start_at = 0.0

    def problem(self) -> str:
        """The reason why it cannot work yet; empty when it can."""
        return "its process has ended" if self.current is None else self.current.problem()

    def processes(self) -> list[ServiceProcess]:
        """Every process of the service that may still run."""
        return [one for one in (self.current, self._successor, self._leaving) if one is not None]

    def poll(self, now: float) -> bool:
        """Handles a crash and starts the process when it is due; returns whether anything changed."""
        statuses = {id(one): one.poll() for one in self.processes()}
        changed = False
        if self.current is not None and (status := statuses[id(self.current)]) is not None:
            self._handle_crash(self.current, status, now)
            changed = True
        # A planned restart starts the next process itself.
        if not self.processes() and now >= self._start_at and (self._restart or self.identity is None):
            self._start()
            changed = True
        return changed

    def _start(self) -> None:
        self.current = self._spawn(self.name)
        self.identity = self.current.identity

    def _handle_crash(self, crashed: ServiceProcess, status: int, now: float) -> None:
        self._report(f"{self.name} ended ({ending(status)})")
        if now - crashed.started > STEADY_SECONDS:
            self._backoff = FIRST_BACKOFF_SECONDS
        self.current = None
        self._start_at = now + self._backoff
        self._backoff = min(MAX_BACKOFF_SECONDS, self._backoff * 2)
        self.restarts += 1

    def restart(self) -> Iterator[Stage]:
        """Replaces the process by a new one on the same sockets; yields its stage whenever it must wait.

        Raises: RestartFailed: the successor did not become ready; the old process continues if it still runs
        """
        return self._restart_in_place() if self.name in ONE_AT_A_TIME else self._restart_beside()

    def _restart_beside(self) -> Iterator[Stage]:
        self._successor = self._spawn(self.name)
        try:
            yield from self._until_ready(self._successor, "the old process continues")
        except RestartFailed:
            self._successor = None
            raise
        old, self.current, self._successor = self.current, self._successor, None
        self.identity = self.current.identity
        if old is not None:
            yield from self._until_gone(old)

    def _restart_in_place(self) -> Iterator[Stage]:
        if self.current is not None:
            old, self.current = self.current, None
            yield from self._until_gone(old)
        self._start()
        assert self.current is not None
        yield from self._until_ready(self.current, "it starts again")

    def _until_ready(self, started: ServiceProcess, otherwise: str) -> Iterator[Stage]:
        seconds = ENGINE_READY_SECONDS if self.name in ONE_AT_A_TIME else READY_SECONDS
        while not started.is_ready:
            if (status := started.poll()) is not None:
                raise RestartFailed(
                    f"the new process ended ({ending(status)}), {otherwise}: see `leyden logs {self.name}`"
                )
            if time.monotonic() > started.started + seconds:
                problem = started.problem()
                started.kill()
                raise RestartFailed(f"the new process was not ready after {seconds:g} s ({problem}), {otherwise}")
            yield "starting"

    def _until_gone(self, old: ServiceProcess) -> Iterator[Stage]:
        self._leaving = old
        termination = Termination([old], hurry_seconds=RESTART_SECONDS)
        while not termination.is_over():
            yield "finishing"
        self._leaving = None


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
