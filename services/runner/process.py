"""Runs one agent under a keeper and tells how it ended. Knows nothing of rollouts, leases or rewards."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import marshal
import os
import resource
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from services.runner import keeper
from services.runner.walls import Walls, no_walls

_ROOT = str(Path(keeper.__file__).resolve().parents[2])
_KEEPER = "import sys; sys.path.append(sys.argv[1]); from services.runner.keeper import main; main()"


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


class Processes:
    """Every agent that this runner has running."""

    def __init__(self) -> None:
        self._keepers: set[int] = set()

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
            process = _start_keeper(command, lifeline, reports)
        except BaseException:
            os.close(held)
            ours.close()
            raise
        finally:
            os.close(lifeline)
            reports.close()
        self._keepers.add(process.pid)
        reading = asyncio.ensure_future(_read_all(ours))
        try:
            return _report(await asyncio.shield(reading), process)
        except asyncio.CancelledError:
            os.close(held)
            held = -1
            await reading
            raise
        finally:
            if held >= 0:
                os.close(held)
            # Its side of the socket has closed, so this waits for microseconds.
            process.wait()
            self._keepers.discard(process.pid)
            if process.returncode != 0:
                self._kill_orphans()

    def _kill_orphans(self) -> None:
        """Kills children of this process that are no keeper: what a dead keeper left, handed to us as its subreaper."""
        # Again until none is left: an orphan's own children become ours when it dies.
        while orphans := self._orphans():
            for orphan in orphans:
                keeper.signal_all([*keeper.descendants(orphan), orphan], signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(orphan, 0)

    def _orphans(self) -> set[int]:
        return {pid for pid, parent in keeper.parents().items() if parent == os.getpid()} - self._keepers


def _start_keeper(command: Command, lifeline: int, reports: socket.socket) -> subprocess.Popen[bytes]:
    kept = (lifeline,) if command.lock is None else (lifeline, command.lock)
    # The orders hold the agent's key: a memory file keeps them out of argv and off the disk.
    with os.fdopen(os.memfd_create("orders"), "r+b") as orders:
        orders.write(marshal.dumps(_orders_of(command)))
        orders.seek(0)
        return subprocess.Popen(
            # Imported and not run as a file, so that its compiled form is used.
            [sys.executable, "-I", "-S", "-c", _KEEPER, _ROOT, *map(str, kept)],
            stdin=orders,
            stdout=reports.fileno(),
            pass_fds=kept,
            start_new_session=True,
            env={},
            cwd="/",
        )


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


def _report(raw: bytes, process: subprocess.Popen[bytes]) -> Ended:
    try:
        report = marshal.loads(raw)  # noqa: S302  # written by our keeper, never by the agent
    except (EOFError, ValueError, TypeError) as error:
        raise KeeperLost(f"keeper {process.pid} ended without a report: was it killed?") from error
    report.pop("abandoned")
    return Ended(**report)
