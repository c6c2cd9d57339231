"""Runs one agent under a keeper and tells how it ended. Knows nothing of rollouts, leases or rewards."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import marshal
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import leyden
from leyden.services.runner import keeper
from leyden.services.runner.walls import Walls, no_walls

_ROOT = str(Path(leyden.__file__).resolve().parents[1])
ANSWER_SECONDS = 10.0
_KEEPER = "import sys; sys.path.append(sys.argv[1]); from leyden.services.runner.keeper import main; main()"


class KeeperLost(Exception):
    """The keeper ended without a report: somebody killed it, or the machine is out of memory or processes."""


@dataclass(frozen=True)
class Command:
    """One execution of an agent.

    Args: argv: program and arguments, no shell; environment: all of it, nothing is inherited; folder: where it starts;
        memory_bytes, cpu_seconds: of each process; output_bytes: kept of stdout and of stderr, from the end;
        walls: what holds it in; lock: a descriptor that the keeper holds open as long as anything of the agent lives.
    """

    argv: list[str]
    environment: dict[str, str]
    folder: Path
    timeout_seconds: float
    grace_seconds: float
    output_bytes: int
    memory_bytes: int | None = None
    cpu_seconds: int | None = None
    open_files: int | None = None
    processes: int | None = None
    file_bytes: int | None = None
    walls: Walls = field(default_factory=no_walls)
    lock: int | None = None


@dataclass(frozen=True)
class Ended:
    """How an agent ended: every descendant is dead by now, unless `clean` is false.

    `exit_code` is negative for a signal and None if it never started (`start_error` says why). `cpu_exceeded`: it
    ignored the first signal of its CPU limit, and the kernel sent the second, SIGKILL. `lacked_memory`: the kernel
    ended processes for want of memory meanwhile; None where it does not tell. `contained`: no other agent could signal
    it.
    """

    exit_code: int | None
    start_error: str | None
    timed_out: bool
    clean: bool
    stdout: bytes
    stderr: bytes
    stdout_total: int
    stderr_total: int
    seconds: float
    cpu_seconds: float
    max_rss_bytes: int
    cpu_exceeded: bool = False
    lacked_memory: bool | None = None
    contained: bool = False


@dataclass(frozen=True)
class Keeper:
    """A keeper at work; `pidfd`, owned by whoever asked for it, tells when it is gone."""

    pid: int
    pidfd: int

    def wait(self) -> None:
        """Returns when the process is gone and what it kept has another parent; closes `pidfd`."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        poll.poll()
        os.close(self.pidfd)
        # Ours by adoption, where the process that it was forked from has ended.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


class Nursery:
    """The process that keepers are forked from, started when it is needed and again when it was killed: a fork costs a
    tenth of the start of an interpreter."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._door: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """None while there is none."""
        return None if self._process is None else self._process.pid

    def fork(self, descriptors: Sequence[int]) -> Keeper:
        """A keeper with these descriptors: orders, reports, lifeline, lock.

        Raises: KeeperLost: it may have begun or not; once the lifeline is closed, it has not or ends
        """
        for _ in range(2):
            door = self._opened()
            try:
                socket.send_fds(door, [b"k"], descriptors)
            except OSError:
                # Killed while nothing was asked of it.
                self.close()
                continue
            return self._answer(door)
        raise KeeperLost("no keeper could be started: the process that they are forked from was killed twice")

    def _answer(self, door: socket.socket) -> Keeper:
        try:
            said, pidfds, _, _ = socket.recv_fds(door, keeper.STARTED.size, 1)
        except TimeoutError:
            said, pidfds = b"", []
        if not said:
            self.close()
            raise KeeperLost("the process that keepers are forked from was killed, or stands still")
        (pid,) = keeper.STARTED.unpack(said)
        if pid < 0:
            raise KeeperLost(f"no keeper could be forked: {os.strerror(-pid)}")
        return Keeper(pid, *pidfds)

    def _opened(self) -> socket.socket:
        if self._door is None:
            self._door, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._door.settimeout(ANSWER_SECONDS)
            with theirs:
                self._process = subprocess.Popen(
                    # Imported and not run as a file, so that its compiled form is used.
                    [sys.executable, "-I", "-S", "-c", _KEEPER, _ROOT],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                    env={},
                    cwd="/",
                )
        return self._door

    def close(self) -> None:
        """Ends the process; keepers at work are not touched."""
        if self._door is not None:
            self._door.close()
            self._door = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Processes:
    """Every agent that this runner has running."""

    def __init__(self) -> None:
        self._keepers: set[int] = set()
        self._nursery = Nursery()

    def adopt_orphans(self) -> None:
        """Makes this process the parent of what a killed keeper leaves behind, so that it can be found and killed."""
        ctypes.CDLL(None).prctl(keeper.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    async def run(self, command: Command) -> Ended:
        """Runs the agent to its end. Cancelling kills its whole tree and waits until it is dead.

        Raises: KeeperLost: the keeper died; what it kept has been killed.
        """
        lifeline, held = os.pipe()
        # A socket and no pipe: uvloop closes a pipe's descriptor twice, and the second time it may be another thread's.
        ours, reports = socket.socketpair()
        try:
            keeper_at_work = self._start_keeper(command, lifeline, reports)
        except BaseException:
            os.close(held)
            ours.close()
            raise
        finally:
            os.close(lifeline)
            reports.close()
        self._keepers.add(keeper_at_work.pid)
        reading = asyncio.ensure_future(_read_all(ours))
        report: Ended | None = None
        try:
            report = _report(await asyncio.shield(reading), keeper_at_work.pid)
        except asyncio.CancelledError:
            os.close(held)
            held = -1
            await reading
            raise
        finally:
            if held >= 0:
                os.close(held)
            # Its side of the socket has closed, so this waits for microseconds.
            keeper_at_work.wait()
            self._keepers.discard(keeper_at_work.pid)
            if report is None:
                self._kill_orphans()
        return report

    def close(self) -> None:
        """Ends what keepers are forked from."""
        self._nursery.close()

    def _start_keeper(self, command: Command, lifeline: int, reports: socket.socket) -> Keeper:
        # The orders hold the agent's key: a memory file keeps them out of argv and off the disk.
        with os.fdopen(os.memfd_create("orders"), "r+b") as orders:
            orders.write(marshal.dumps(_orders_of(command)))
            orders.seek(0)
            lock = () if command.lock is None else (command.lock,)
            return self._nursery.fork((orders.fileno(), reports.fileno(), lifeline, *lock))

    def _kill_orphans(self) -> None:
        """Kills children of this process that are no keeper: what a dead keeper left, handed to us as its subreaper."""
        # Again until none is left: an orphan's own children become ours when it dies.
        while orphans := self._orphans():
            for orphan in orphans:
                keeper.signal_all([*keeper.descendants(orphan), orphan], signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(orphan, 0)

    def _orphans(self) -> set[int]:
        ours = {self._nursery.pid, *self._keepers}
        return {pid for pid, parent in keeper.parents().items() if parent == os.getpid()} - ours


def _orders_of(command: Command) -> dict[str, object]:
    bounds = [
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_AS, command.memory_bytes, command.memory_bytes),
        # SIGXCPU at the limit, SIGKILL soon after.
        (resource.RLIMIT_CPU, command.cpu_seconds, command.cpu_seconds and command.cpu_seconds + 5),
        (resource.RLIMIT_NOFILE, command.open_files, command.open_files),
        (resource.RLIMIT_NPROC, command.processes, command.processes),
        (resource.RLIMIT_FSIZE, command.file_bytes, command.file_bytes),
    ]
    return {
        "command": command.argv,
        "environment": command.environment,
        "folder": str(command.folder),
        "timeout_seconds": command.timeout_seconds,
        "grace_seconds": command.grace_seconds,
        "output_bytes": command.output_bytes,
        "limits": [bound for bound in bounds if bound[1] is not None],
        "walls": dict(command.walls),
    }


async def _read_all(ours: socket.socket) -> bytes:
    reader, writer = await asyncio.open_connection(sock=ours)
    try:
        return await reader.read()
    finally:
        writer.close()


def _report(raw: bytes, pid: int) -> Ended:
    try:
        report = marshal.loads(raw)  # noqa: S302  # written by our keeper, never by the agent
    except (EOFError, ValueError, TypeError) as error:
        raise KeeperLost(f"keeper {pid} ended without a report: was it killed?") from error
    report.pop("abandoned")
    return Ended(**report)
