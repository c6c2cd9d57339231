"""Executes each attempt as a process tree of this machine: a workspace, a user, a sandbox, a supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, cast

from leyden.libs.contracts.config import ProcessRunner
from leyden.libs.service.errors import Misconfigured
from leyden.libs.telemetry import logger
from leyden.services.runner.backends.base import AttemptSpec, BackendError, Exit
from leyden.services.runner.backends.process import supervisor
from leyden.services.runner.backends.process.sandbox import SIGNAL_LANDLOCK, USABLE_LANDLOCK, landlock_abi
from leyden.services.runner.backends.process.system_calls import can_filter
from leyden.services.runner.backends.process.users import REMEDIES, SandboxUser, closed_to, sandbox_users
from leyden.services.runner.backends.process.workspace import (
    AgentFolder,
    Workspace,
    Workspaces,
    others_filled_disk,
    remove_tree,
)
from leyden.services.runner.settings import Settings, open_work_folder

if TYPE_CHECKING:
    from leyden.services.runner.backends.process.sandbox import Sandbox
    from leyden.services.runner.backends.process.supervisor import Orders, Report

log = logger()

CHECK = AttemptSpec("check", ["{python}", "-I", "-S", "-c", ""], {}, {}, {}, None, ProcessRunner(timeout_seconds=60))
WRITABLE_BY_ROOT = ("/tmp", "/var/tmp", tempfile.gettempdir(), "/dev")  # noqa: S108  # nothing is made there
"""The folders in which an agent that stays root may write beside its workspace: those of every user."""
SHELL_SIGKILL = 128 + signal.SIGKILL  # a shell whose last command got one
# Imported and not run as a file, so that its compiled form is used; found from its own folder, not from `leyden`, whose
# dependencies `-S` hides.
_SUPERVISE = "import sys; sys.path.append(sys.argv[1]); from process.supervisor import main; main()"
_BACKENDS = str(Path(supervisor.__file__).resolve().parents[1])


class ProcessBackend:
    """The attempts of one runner on this machine.

    Args: owner: the name of the runner and of its folder of workspaces.
    Raises: Misconfigured: a setting cannot be followed here
    """

    def __init__(self, settings: Settings, owner: str) -> None:
        self._settings = settings
        self._users = sandbox_users(settings)
        work_folder = self._work_folder()
        private = (*settings.hidden_paths, settings.capability_keys_file, work_folder)
        self._hidden = [os.path.realpath(path) for path in private if path is not None]
        self._workspaces = Workspaces(work_folder, owner)
        self._landlock = landlock_abi()
        if self._landlock < USABLE_LANDLOCK:
            log.warning(
                "this kernel has no usable Landlock (5.19 or later): agents can inspect processes of their own user,"
                " and lower their oom_score_adj, so that the kernel ends the platform before them when memory is short",
                own_users=self._users.first is not None,
            )
        self._can_filter = can_filter()
        if not self._can_filter:
            log.warning("this kernel has no seccomp filters: user namespaces and io_uring are open to agents")
        self._supervisors = Supervisors()

    def _work_folder(self) -> Path:
        """RUNNER_WORK_FOLDER, or an open one where agents' own users could not pass to it."""
        folder = self._settings.work_folder
        if self._users.first is None or closed_to(self._users.first, [str(folder)]) is None:
            return folder
        log.warning("work folder is closed to agents' users", work_folder=str(folder), instead=str(open_work_folder()))
        return open_work_folder()

    async def check(self) -> None:
        """Starts RUNNER_PYTHON once, as agents are started. From now on this process adopts their orphans.

        Raises: Misconfigured: it does not run; the message names the remedy
        """
        supervisor.become_subreaper()
        try:
            ended = await self.run(CHECK)
            why = None if ended.exit_code == 0 else ended.stderr.decode(errors="replace") or "it did not end in time"
        except BackendError as error:
            why = str(error)
        if why is not None:
            raise Misconfigured(
                f"agents cannot start RUNNER_PYTHON, {self._settings.python} ({why}): {REMEDIES}, or name another "
                "interpreter there"
            )

    async def run(self, spec: AttemptSpec) -> Exit:
        """Runs the agent to its end. Cancelling kills its process tree and waits until it is dead.

        Raises: BackendError: no workspace, no user, no start, or a lost supervisor
        """
        try:
            with self._users.lend() as user:
                return await self._run_as(user, spec)
        except OSError as error:
            raise BackendError(str(error)) from error

    async def _run_as(self, user: SandboxUser, spec: AttemptSpec) -> Exit:
        stop = threading.Event()
        making = asyncio.ensure_future(asyncio.to_thread(self._make_workspace, spec, user, stop))
        try:
            workspace = await asyncio.shield(making)
        except asyncio.CancelledError:
            stop.set()
            await asyncio.wait([making])
            if making.exception() is None:
                await asyncio.shield(asyncio.to_thread(remove_tree, making.result().root))
            raise
        except OSError as error:
            raise BackendError(f"the working folder could not be made: {error}") from error
        try:
            report = await self._supervisors.run(self._orders(spec, workspace, user), user.lock)
            lacked_room = await asyncio.to_thread(others_filled_disk, workspace.root)
        finally:
            await asyncio.shield(asyncio.to_thread(remove_tree, workspace.root))
        if not report["all_dead"]:
            log.warning("a process of an attempt survived SIGKILL", attempt=spec.name)
        contained = user.uid is not None or self._landlock >= SIGNAL_LANDLOCK
        return exit_of(report, contained=contained, lacked_room=lacked_room)

    async def survivors(self) -> list[tuple[str, int]]:
        """None: supervisors end with their runner."""
        return []

    async def discard(self, rollout_id: str, attempt: int) -> None:
        """Does nothing, as there are no survivors."""

    def detach(self) -> bool:
        """False: supervisors end with their runner."""
        return False

    async def close(self) -> None:
        """Removes the folder of this runner's workspaces."""
        await asyncio.to_thread(self._workspaces.close)

    def _make_workspace(self, spec: AttemptSpec, user: SandboxUser, stop: threading.Event) -> Workspace:
        if spec.directory is None:
            return self._workspaces.make(spec.name, spec.task, None, user.uid, spec.task_file)
        # Opened before the check of its path, so that nobody can exchange it in between.
        try:
            descriptor = os.open(spec.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK)
        except OSError as error:
            message = f"agent.directory {spec.directory} cannot be opened ({error.strerror}): correct its path"
            raise OSError(message) from error
        try:
            self._check_directory(Path(f"/proc/self/fd/{descriptor}").readlink())
            folder = AgentFolder(descriptor, self._settings.max_directory_bytes, stop)
            return self._workspaces.make(spec.name, spec.task, folder, user.uid, spec.task_file)
        finally:
            os.close(descriptor)

    def _check_directory(self, folder: Path) -> None:
        """Raises: PermissionError: the runner, perhaps root, may not copy this folder for an agent"""
        if any(folder.is_relative_to(path) or Path(path).is_relative_to(folder) for path in self._hidden):
            raise PermissionError(f"{folder} belongs to the platform: keep the agent's files in another folder")
        if not any(folder.is_relative_to(os.path.realpath(root)) for root in self._settings.agent_roots):
            roots = ", ".join(map(str, self._settings.agent_roots)) or "none"
            raise PermissionError(
                f"agent.directory {folder} lies in no folder of RUNNER_AGENT_ROOTS ({roots}): move it there, or name "
                "the folder of your agents to the platform (`leyden up --agents DIR`)"
            )

    def _orders(self, spec: AttemptSpec, workspace: Workspace, user: SandboxUser) -> Orders:
        limits, (first, *rest) = spec.limits, spec.command
        assert isinstance(limits, ProcessRunner)
        command = [self._settings.python if first == "{python}" else first, *rest]
        if user.uid is not None:
            self._check_reachable(user.uid, command, workspace)
        return {
            "command": command,
            "environment": self._environment(spec, workspace, user),
            "stdin": str(workspace.task_file) if spec.task_on_stdin else os.devnull,
            "folder": str(workspace.work),
            "timeout_seconds": limits.timeout_seconds,
            "grace_seconds": self._settings.grace_seconds,
            "output_bytes": limits.output_bytes,
            "memory_bytes": limits.memory_bytes,
            "limits": self._limits(limits, user),
            "sandbox": self._sandbox(workspace, user),
        }

    def _check_reachable(self, uid: int, command: list[str], workspace: Workspace) -> None:
        """Raises: PermissionError: the agent's user cannot pass to its program, an argument, or its workspace"""
        program = shutil.which(command[0], path=self._settings.agent_path) or command[0]
        named = [path for path in (program, *command[1:]) if path.startswith("/") and os.path.lexists(path)]
        closed = closed_to(uid, [str(workspace.root), *named])
        if closed is not None:
            raise PermissionError(f"{closed} is closed to the user that the agent becomes: {REMEDIES}")

    def _environment(self, spec: AttemptSpec, workspace: Workspace, user: SandboxUser) -> dict[str, str]:
        # For programs that ask for their user's name: a uid of an attempt's own has none.
        user_names = {"USER": "agent", "LOGNAME": "agent"} if user.uid is not None else {}
        return {
            "PATH": self._settings.agent_path,
            "HOME": str(workspace.work),
            "TMPDIR": str(workspace.scratch),
            **user_names,
            **spec.environment,
            **spec.secrets,
            "LEYDEN_TASK_FILE": str(workspace.task_file),
        }

    def _limits(self, limits: ProcessRunner, user: SandboxUser) -> list[tuple[int, int, int]]:
        cpu = limits.cpu_seconds
        bounds = [
            (resource.RLIMIT_CORE, 0, 0),
            # SIGXCPU at the first, SIGKILL at the second.
            (resource.RLIMIT_CPU, cpu, cpu and cpu + 5),
            (resource.RLIMIT_NOFILE, self._settings.max_open_files, self._settings.max_open_files),
            (resource.RLIMIT_FSIZE, self._settings.max_file_bytes, self._settings.max_file_bytes),
        ]
        if user.uid is not None:
            bounds.append((resource.RLIMIT_NPROC, self._settings.max_processes, self._settings.max_processes))
        return [(number, soft, hard) for number, soft, hard in bounds if soft is not None and hard is not None]

    def _sandbox(self, workspace: Workspace, user: SandboxUser) -> Sandbox:
        # Without capabilities root still owns every file of root: by `/proc/sys` alone it could take the machine over.
        stays_root = user.uid is None and os.geteuid() == 0
        return {
            "uid": user.uid,
            "landlock": self._landlock >= USABLE_LANDLOCK,
            "hidden": [path for path in self._hidden if Path(path).exists()],
            "visible": os.path.realpath(workspace.root),
            "filter": self._can_filter,
            "writable": [os.path.realpath(folder) for folder in WRITABLE_BY_ROOT] if stays_root else None,
        }


def exit_of(report: Report, *, contained: bool, lacked_room: bool = False) -> Exit:
    """The end of the agent, with the cause where that is not the agent.

    Args: contained: no other agent can signal this one; lacked_room: others had filled the disk of its workspace
    Raises: BackendError: the agent never started
    """
    if report["start_error"] is not None:
        raise BackendError(f"the agent could not be started: {report['start_error']}")
    return Exit(
        exit_code=report["exit_code"],
        stdout=report["stdout"],
        stderr=report["stderr"],
        reward_line=report["reward_line"],
        seconds=report["seconds"],
        timed_out=report["timed_out"],
        limit_exceeded=_limit_exceeded(report),
        platform_failure=_platform_failure(report, contained=contained, lacked_room=lacked_room),
    )


def _limit_exceeded(report: Report) -> str | None:
    if report["memory_bytes"] is not None:
        return f"the agent used more memory than allowed (runner.memory_bytes): {report['memory_bytes'] >> 20} MiB"
    return "the agent went on after its limit of CPU time" if report["cpu_exceeded"] else None


def _platform_failure(report: Report, *, contained: bool, lacked_room: bool) -> str | None:
    """Attributes a failure on a full disk, and a SIGKILL that the supervisor did not send.

    The kernel sent it while memory was short: ours. An agent that no other can signal, while memory was not short, sent
    it itself: its own, since it could otherwise throw away tries that go badly. The sender is unknown: ours.
    """
    if report["timed_out"] or _limit_exceeded(report) is not None:
        return None
    if report["exit_code"] != 0 and lacked_room:
        return "the agent failed while the disk of RUNNER_WORK_FOLDER was full: give it more room"
    if report["exit_code"] in {-signal.SIGKILL, SHELL_SIGKILL} and report["lacked_memory"]:
        return "ended by a SIGKILL while the kernel ended processes for want of memory"
    if report["exit_code"] == -signal.SIGKILL and (report["lacked_memory"] is None or not contained):
        return "ended by a SIGKILL that the platform did not send: is memory short?"
    return None


class Supervisors:
    """The supervisor processes of this runner, one per running attempt."""

    def __init__(self) -> None:
        self._pids: set[int] = set()

    async def run(self, orders: Orders, lock: int | None = None) -> Report:
        """Runs one agent to its end. Cancelling kills its process tree and waits until it is dead.

        Args: lock: a descriptor that the supervisor holds open as long as anything of the agent lives.
        Raises: BackendError: the supervisor died; its agent has been killed
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
            raise BackendError(f"supervisor {process.pid} ended without a report: was it killed?")
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
        return {pid for pid, parent in supervisor.parents().items() if parent == os.getpid()} - self._pids


def _parse(report: bytes) -> Report | None:
    """The supervisor's report, or None where it wrote none or a part of one."""
    try:
        return cast("Report", marshal.loads(report))  # noqa: S302  # by our supervisor, never the agent
    except (EOFError, ValueError, TypeError):
        return None


def _start(orders: Orders, stdout: socket.socket, lock: int | None) -> subprocess.Popen[bytes]:
    # The orders hold the agent's key: a memory file keeps them out of argv and off the disk.
    with os.fdopen(os.memfd_create("orders"), "r+b") as file:
        file.write(marshal.dumps((dict(orders), lock)))
        file.seek(0)
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _SUPERVISE, _BACKENDS],
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
