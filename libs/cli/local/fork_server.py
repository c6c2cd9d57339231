"""Starts services as forks of one process that has imported their shared modules: these are in memory once.

`python -P -m leyden.libs.cli.local.fork_server`, with a socket as its standard input, is that process. It has one
thread and no event loop, and never sees a service's variables: a fork reads them from a socket of its own. The fork
gets a session, a log and a name in `ps` of its own, and the kernel kills it when the fork server ends.
"""

# Why: seven services took 697 MB as processes of their own, and take 445 MB with this one (bench row "memory of all
# processes at rest").
# `multiprocessing.forkserver` gives its forks neither variables, a log nor a session, imports the supervisor's main
# module in each, and adds a process that tracks resources.

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from leyden.libs.embedded.launch import die_with_parent

SHARED = (
    *("aiohttp", "cryptography.hazmat.primitives.asymmetric.ec", "fastapi", "httptools", "httpx", "jwt", "uvloop"),
    *("psycopg", "redis.asyncio", "sqlalchemy.dialects.postgresql.psycopg", "uvicorn.lifespan.off"),
    *("leyden.libs.contracts.api.runs", "leyden.libs.contracts.capability", "leyden.libs.contracts.config"),
    *("leyden.libs.contracts.recipes", "leyden.libs.contracts.samples", "leyden.libs.queue", "leyden.libs.service"),
    *("leyden.libs.service.startup", "leyden.libs.store.database", "leyden.libs.store.tables"),
)
"""Modules that most services import. None may start a thread, open a socket, read a setting or define a metric of one
service."""
ANSWER_SECONDS = 60.0
"""Bound on one answer; the first one follows the imports."""
FORK, MAX_MESSAGE = b"fork", 64
LOG = "fork-server.log"


class ForkServer:
    """The supervisor's side of a fork server; the supervising thread alone starts services.

    Args: popen: the process; connection: the socket whose other end is its standard input; both owned by this object
    """

    def __init__(self, popen: subprocess.Popen[bytes], connection: socket.socket) -> None:
        self.popen = popen
        self._connection = connection
        self._connection.settimeout(ANSWER_SECONDS)
        self._lock = threading.Lock()

    def start(
        self, module: str, variables: Mapping[str, str], output: int, descriptors: Mapping[str, int]
    ) -> ForkedProcess:
        """Starts a module as a program.

        Args: variables: all of its environment; output: the file of its output and errors;
            descriptors: those that it inherits, by the variable that tells their number
        Raises: OSError: there is no fork server any more, or it could not fork
        """
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.settimeout(ANSWER_SECONDS)
            pid = self.ask(FORK, theirs.fileno())
            if pid < 0:
                raise OSError(-pid, os.strerror(-pid))
            process = ForkedProcess(self, pid)
            request = {"module": module, "variables": dict(variables), "descriptors": list(descriptors)}
            try:
                socket.send_fds(ours, [b"."], [output, *descriptors.values()])
                ours.sendall(json.dumps(request).encode())
            except OSError:
                process.kill()
                process.wait()
                raise
        return process

    def ask(self, request: bytes, *descriptors: int) -> int:
        """The answer to one request. Raises: OSError"""
        with self._lock:
            try:
                socket.send_fds(self._connection, [request], descriptors)
                answer = int(self._connection.recv(MAX_MESSAGE))
            except (OSError, ValueError) as error:
                # A late answer would be taken for that to the next request.
                self.popen.kill()
                raise ConnectionError(f"the fork server has ended or does not answer: see {LOG}") from error
        return answer

    def close(self) -> None:
        """Ends the fork server, and with it the services that still run."""
        self._connection.close()
        self.popen.kill()
        self.popen.wait()


class ForkedProcess:
    """A service that a fork server has started, with the methods of `subprocess.Popen`; safe in several threads."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self._server = server
        # The pid is this process's until the fork server is asked for its status.
        self._end = os.pidfd_open(pid)
        self._status: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        with self._lock:
            return self._poll(0)

    def wait(self) -> int:
        """Waits for the end and returns the exit status."""
        with self._lock:
            status = self._poll(None)
        assert status is not None
        return status

    def send_signal(self, number: int) -> None:
        """Sends a signal, if it still runs."""
        with self._lock:
            if self._poll(0) is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _poll(self, milliseconds: int | None) -> int | None:
        if self._status is None:
            ending = select.poll()
            ending.register(self._end, select.POLLIN)
            if ending.poll(milliseconds):
                try:
                    self._status = self._server.ask(str(self.pid).encode())
                except OSError:
                    # It died with the fork server.
                    self._status = -signal.SIGKILL
                os.close(self._end)
        return self._status


def main() -> None:
    """Imports the shared modules, then forks for each request; a fork becomes its service."""
    connection = socket.socket(fileno=os.dup(0))
    # Imported late: the supervisor does without.
    from leyden.libs.telemetry.imports import without_rich

    with without_rich():
        for name in SHARED:
            importlib.import_module(name)
    # A collection would write to pages that the forks share.
    gc.collect()
    gc.freeze()
    parent = os.getpid()
    own = _forked(connection)
    os.setsid()
    die_with_parent(parent)
    with own:
        _, (output, *descriptors), _, _ = socket.recv_fds(own, 1, 8, socket.MSG_CMSG_CLOEXEC)
        request = json.load(own.makefile("rb"))
    with Path(os.devnull).open("rb") as null:
        os.dup2(null.fileno(), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(request["variables"])
    os.environ.update(zip(request["descriptors"], map(str, descriptors), strict=True))
    _rename(request["module"])
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def _forked(connection: socket.socket) -> socket.socket:
    """Answers until the supervisor ends: a fork's pid or its negative error, or the status of a fork that has ended.

    Returns: in each fork, the socket of its request
    """
    while True:
        request, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE, 1, socket.MSG_CMSG_CLOEXEC)
        if not request:
            sys.exit()
        if request != FORK:
            answer = os.waitstatus_to_exitcode(os.waitpid(int(request), 0)[1])
        else:
            own = socket.socket(fileno=descriptors[0])
            try:
                answer = os.fork()
            except OSError as error:
                answer = -(error.errno or 1)
            if answer == 0:
                connection.close()
                return own
            own.close()
        connection.send(str(answer).encode())


def _rename(module: str) -> None:
    """Writes the module in place of this one's name, at the end of the arguments that `ps` shows."""
    with contextlib.suppress(OSError):
        arguments = Path("/proc/self/cmdline").read_bytes()
        end = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[46])
        name = arguments.split(b"\0")[-2]
        # Some kernels give no address.
        if end == 0:
            return
        ctypes.memmove(end - len(name) - 1, module.encode()[: len(name)].ljust(len(name), b"\0"), len(name))


if __name__ == "__main__":
    main()
