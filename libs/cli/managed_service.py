"""One service that is kept running: its process, its death and restart, and its replacement by a successor."""

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
from leyden.libs.cli.services import KILL_SECONDS, ROLL_SECONDS

FIRST_BACKOFF_SECONDS = 0.2
MAX_BACKOFF_SECONDS = 10.0
STEADY_SECONDS = 30.0
READY_SECONDS = 120.0
"""How long a successor may take until it can work."""

ONE_AT_A_TIME = frozenset({"engine"})
"""Replaced only after the old process has ended: two copies of the weights may not fit into memory."""

Stage = Literal["starting", "finishing"]


class RollFailed(Exception):
    """A service was not replaced; the message says why, and what runs now."""


class Child:
    """A process of a service, and what it says of its readiness over a pipe.

    Args: pipe: the reading end, owned by this object
    """

    def __init__(self, popen: subprocess.Popen[bytes], pipe: int) -> None:
        self.popen = popen
        self.known_as: Process = process(popen.pid)
        self.started = time.monotonic()
        self.is_ready = False
        self._causes = "not started yet"
        self._said = b""
        self._pipe: int | None = pipe
        os.set_blocking(pipe, False)

    def look(self) -> None:
        """Reads what it says; nothing more once it is ready."""
        if self._pipe is None:
            return
        with contextlib.suppress(BlockingIOError):
            while said := os.read(self._pipe, 65536):
                self._said += said
            # Closed: it is ready, or it died.
            self._close()
        *lines, self._said = self._said.split(b"\n")
        if lines:
            results: dict[str, str] = json.loads(lines[-1])
            wrong = [f"{check} {result}" for check, result in results.items() if result != "ok"]
            self.is_ready, self._causes = not wrong, ", ".join(wrong)

    def causes(self) -> str:
        """Why it cannot work yet; empty when it can."""
        return self._causes if self.ended() is None else "its process has ended"

    def ended(self) -> int | None:
        """Its exit status; None while it runs."""
        status = self.popen.poll()
        if status is not None:
            self._close()
        return status

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal, unless it has ended."""
        self.popen.send_signal(number)

    def _close(self) -> None:
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None


class Kept:
    """A service. All of it runs in the supervising thread, whose death its processes would not survive.

    Args: spawn: starts a process of the service; report: told in a few words what happens;
        restart: whether it is started again when it dies
    """

    def __init__(
        self, name: str, spawn: Callable[[str], Child], report: Callable[[str], None], *, restart: bool
    ) -> None:
        self.name = name
        self.child: Child | None = None
        self.known_as: Process | None = None
        self.restarts = 0
        self._spawn = spawn
        self._report = report
        self._restart = restart
        self._successor: Child | None = None
        self._leaving: Child | None = None
        self._backoff = FIRST_BACKOFF_SECONDS
        self._start_at = 0.0

    def causes(self) -> str:
        """Why it cannot work yet; empty when it can."""
        return "its process has ended" if self.child is None else self.child.causes()

    def processes(self) -> list[Child]:
        """Every process of the service that may still run."""
        return [child for child in (self.child, self._successor, self._leaving) if child is not None]

    def keep(self, now: float) -> bool:
        """Buries what died and starts what is due; whether anything changed."""
        for child in self.processes():
            child.look()
        changed = False
        if self.child is not None and (status := self.child.ended()) is not None:
            self._bury(self.child, status, now)
            changed = True
        # A successor, or the end of the old process, is being waited for: starting one more would be one too many.
        if self.child is None and self._successor is None and self._leaving is None and self._is_due(now):
            self._start()
            changed = True
        return changed

    def _is_due(self, now: float) -> bool:
        return now >= self._start_at and (self._restart or self.known_as is None)

    def _start(self) -> None:
        self.child = self._spawn(self.name)
        self.known_as = self.child.known_as

    def _bury(self, child: Child, status: int, now: float) -> None:
        self._report(f"{self.name} ended ({manner(status)})")
        if now - child.started > STEADY_SECONDS:
            self._backoff = FIRST_BACKOFF_SECONDS
        self.child = None
        self._start_at = now + self._backoff
        self._backoff = min(MAX_BACKOFF_SECONDS, self._backoff * 2)
        self.restarts += 1

    def roll(self) -> Iterator[Stage]:
        """Replaces the process by a new one on the same sockets; yields its stage whenever it must wait.

        Raises: RollFailed: the successor did not become ready; the old process goes on, where it still runs
        """
        return self._roll_after() if self.name in ONE_AT_A_TIME else self._roll_beside()

    def _roll_beside(self) -> Iterator[Stage]:
        self._successor = self._spawn(self.name)
        try:
            yield from self._until_ready(self._successor, "the one before goes on")
        except RollFailed:
            self._successor = None
            raise
        old, self.child, self._successor = self.child, self._successor, None
        self.known_as = self.child.known_as
        if old is not None:
            yield from self._until_gone(old)

    def _roll_after(self) -> Iterator[Stage]:
        if self.child is not None:
            old, self.child = self.child, None
            yield from self._until_gone(old)
        self._start()
        assert self.child is not None
        yield from self._until_ready(self.child, "it is started again")

    def _until_ready(self, child: Child, otherwise: str) -> Iterator[Stage]:
        deadline = child.started + READY_SECONDS
        while not child.is_ready:
            if (status := child.ended()) is not None:
                raise RollFailed(
                    f"the new process ended ({manner(status)}), {otherwise}: see `leyden logs {self.name}`"
                )
            if time.monotonic() > deadline:
                causes = child.causes()
                child.signal(signal.SIGKILL)
                child.popen.wait()
                raise RollFailed(f"the new process was not ready after {READY_SECONDS:g} s ({causes}), {otherwise}")
            yield "starting"
            child.look()

    def _until_gone(self, old: Child) -> Iterator[Stage]:
        self._leaving = old
        ending = Ending([old], hurry_seconds=ROLL_SECONDS)
        while not ending.is_over():
            yield "finishing"
        self._leaving = None


class Ending:
    """Processes that were asked to end: SIGTERM, after a while a second one, after some seconds more SIGKILL."""

    def __init__(self, children: list[Child], *, hurry_seconds: float) -> None:
        self._children = children
        now = time.monotonic()
        self._steps = [
            (now, signal.SIGTERM),
            (now + hurry_seconds, signal.SIGTERM),
            (now + hurry_seconds + KILL_SECONDS, signal.SIGKILL),
        ]

    def is_over(self, *, kill: bool = False) -> bool:
        """Whether all have ended; sends what is due until then.

        Args: kill: SIGKILL now
        """
        running = [child for child in self._children if child.ended() is None]
        due = [number for when, number in self._steps if kill or time.monotonic() >= when]
        self._steps = self._steps[len(due) :]
        for child in running:
            for number in due[-1:]:
                child.signal(number)
        return not running


def manner(status: int) -> str:
    """How a process ended, in words."""
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
