"""The supervisor processes of a service: each runs one program to its end and reports it."""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

from leyden.libs.sandbox import supervisor

if TYPE_CHECKING:
    from leyden.libs.sandbox.supervisor import Orders, Report

# Imported and not run as a file, so that its compiled form is used; found from its own folder, not from `leyden`, whose
# dependencies `-S` hides.
_SUPERVISE = "import sys; sys.path.append(sys.argv[1]); from sandbox.supervisor import main; main()"
_LIBS = str(Path(supervisor.__file__).resolve().parents[1])


class ProgramError(Exception):
    """The program could not be started or was lost: its end is unknown."""


class Supervisors:
    """The supervisor processes of this process, one per running program.

    A lost one leaves its processes to this process, in sessions of their own: none is in the session of this process.

    Args: spared: the children in other sessions that no lost supervisor has left
    """

    _pids: ClassVar[set[int]] = set()
    """The supervisors of this process, whoever started them. Another child may be the program of a dead one."""

    def __init__(self, spared: Callable[[], Collection[int]] = tuple) -> None:
        self._spared = spared

    async def run(self, orders: Orders, lock: int | None = None) -> Report:
        """Runs one program to its end. Cancelling kills its process tree and waits until it is dead.

        Args: lock: a descriptor that the supervisor holds open as long as anything of the program lives.
        Raises: ProgramError: the supervisor died; its program has been killed
        """
        # No pipe: uvloop closes a pipe's descriptor twice, and the second time it may be another thread's.
        ours, theirs = socket.socketpair()
        try:
            process = _start(orders, theirs, lock)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._pids.add(process.pid)
        reading = asyncio.ensure_future(_read_all(ours))
        report: Report | None = None
        try:
            report = _parse(await asyncio.shield(reading))
        except asyncio.CancelledError:
            if not reading.done():
                # The end of this stream is the order to kill; the report still comes.
                ours.shutdown(socket.SHUT_WR)
            report = _parse(await reading)
            raise
        finally:
            # Its side of the socket has closed, so this waits for microseconds.
            process.wait()
            self._pids.discard(process.pid)
            if report is None:
                self._kill_orphans()
        if report is None:
            raise ProgramError(f"supervisor {process.pid} ended without a report: was it killed?")
        return report

    def _kill_orphans(self) -> None:
        """Kills children of this process that are no supervisor: a dead supervisor left them to us, its subreaper."""
        # Again until none is left: an orphan's own children become ours when it dies.
        while orphans := self._orphans():
            for orphan in orphans:
                supervisor.signal_all([*supervisor.descendants(orphan), orphan], signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(orphan, 0)

    def _orphans(self) -> set[int]:
        children = {pid for pid, parent in supervisor.parents().items() if parent == os.getpid()}
        return {pid for pid in children - self._pids - set(self._spared()) if not _is_of_this_session(pid)}


def _is_of_this_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == os.getsid(0)
    except ProcessLookupError:
        # Its own caller has seen its end.
        return True


def _parse(report: bytes) -> Report | None:
    """The supervisor's report, or None where it wrote none or a part of one."""
    try:
        return cast("Report", marshal.loads(report))  # noqa: S302  # by our supervisor, never the program
    except (EOFError, ValueError, TypeError):
        return None


def _start(orders: Orders, stdout: socket.socket, lock: int | None) -> subprocess.Popen[bytes]:
    # The orders may hold a key: a memory file keeps them out of argv and off the disk.
    with os.fdopen(os.memfd_create("orders"), "r+b") as file:
        file.write(marshal.dumps((dict(orders), lock)))
        file.seek(0)
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _SUPERVISE, _LIBS],
            stdin=file,
            stdout=stdout.fileno(),
            pass_fds=() if lock is None else (lock,),
            start_new_session=True,
            env={},
            cwd="/",
        )


async def _read_all(reports: socket.socket) -> bytes:
    reader, writer = await asyncio.open_connection(sock=reports)
    try:
        return await reader.read()
    finally:
        writer.close()
