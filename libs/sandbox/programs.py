"""Executes programs as process trees of this machine, each with a workspace, a user, a sandbox and a supervisor."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from leyden.libs.sandbox import supervisor
from leyden.libs.sandbox.artifacts import read_artifacts
from leyden.libs.sandbox.ended import Ended, ended_of
from leyden.libs.sandbox.fresh import FreshWorkspaces
from leyden.libs.sandbox.mounts import place_of_workspaces, rights_to_show, texts_with_paths, view_of
from leyden.libs.sandbox.place import Place, open_work_folder
from leyden.libs.sandbox.program import Program
from leyden.libs.sandbox.sandbox import SIGNAL_LANDLOCK, USABLE_LANDLOCK, landlock_abi
from leyden.libs.sandbox.supervisors import ProgramError, Supervisors
from leyden.libs.sandbox.system_calls import can_filter
from leyden.libs.sandbox.users import REMEDIES, SandboxUser, closed_to, sandbox_users
from leyden.libs.sandbox.workspace import Workspace, Workspaces, others_filled_disk, read_result
from leyden.libs.service.errors import Misconfigured
from leyden.libs.telemetry import logger

if TYPE_CHECKING:
    from leyden.libs.sandbox.sandbox import Sandbox
    from leyden.libs.sandbox.supervisor import Orders
    from leyden.libs.sandbox.view import View

log = logger()

WRITABLE_BY_ROOT = ("/tmp", "/var/tmp", tempfile.gettempdir(), "/dev")  # noqa: S108  # nothing is made there
"""The folders in which a program that stays root may write beside its workspace: those of every user."""


class Programs:
    """The programs of one process on this machine.

    Args: owner: the name of the process and of its folder of workspaces; spared: its children that are no programs
    Raises: Misconfigured: a setting cannot be followed here
    """

    def __init__(self, place: Place, owner: str, spared: Callable[[], Collection[int]] = tuple) -> None:
        self._place = place
        self._users = sandbox_users(place)
        work_folder = self._work_folder()
        self._hidden = [os.path.realpath(path) for path in (*place.hidden_paths, work_folder)]
        self._workspaces = Workspaces(work_folder, owner, f"{place.names.prefix}_WORK_FOLDER")
        self._fresh = FreshWorkspaces(place, self._workspaces, self._hidden)
        self._landlock = landlock_abi()
        if self._landlock < USABLE_LANDLOCK:
            log.warning(
                f"this kernel has no usable Landlock (5.19 or later): {place.names.program}s can inspect processes of"
                " their own user, and lower their oom_score_adj, so that the kernel ends the platform before them when"
                " memory is short",
                own_users=self._users.first is not None,
            )
        self._seen_at = place_of_workspaces(self._workspaces.room)
        own_users = self._users.first is not None
        self._rights = rights_to_show(self._workspaces.room, self._workspaces.root, own_users=own_users)
        if self._rights is None:
            log.warning(
                f"{place.names.program}s share /tmp, /var/tmp and /dev/shm, and each has another path for its"
                " files: this process may neither mount nor make user namespaces (`leyden doctor` names the remedy)"
            )
        self._can_filter = can_filter()
        if not self._can_filter:
            log.warning(
                f"this kernel has no seccomp filters: user namespaces and io_uring are open to {place.names.program}s"
            )
        self._supervisors = Supervisors(spared)

    def _work_folder(self) -> Path:
        """The place's, or an open one where programs' own users could not pass to it."""
        folder = self._place.work_folder
        if self._users.first is None or closed_to(self._users.first, [str(folder)]) is None:
            return folder
        log.warning(
            "work folder is closed to programs' users", work_folder=str(folder), instead=str(open_work_folder())
        )
        return open_work_folder()

    async def check(self) -> None:
        """Starts the place's interpreter once. From now on this process adopts programs' orphans.

        Raises: Misconfigured: it does not run; the message names the remedy
        """
        supervisor.become_subreaper()
        check = Program("check", ["{python}", "-I", "-S", "-c", ""], {}, {}, "LEYDEN_TASK_FILE", 60.0, 1_000_000)
        try:
            ended = await self.run(check)
            why = None if ended.exit_code == 0 else ended.stderr.decode(errors="replace") or "it did not end in time"
        except ProgramError as error:
            why = str(error)
        if why is not None:
            names = self._place.names
            raise Misconfigured(
                f"{names.program}s cannot start {names.prefix}_PYTHON, {self._place.python} ({why}): {REMEDIES}, or"
                " name another interpreter there"
            )

    async def run(self, program: Program) -> Ended:
        """Runs the program to its end. Cancelling kills its process tree and waits until it is dead.

        Raises: ProgramError: no workspace, no user, no start, or a lost supervisor
        """
        try:
            with self._users.lend() as user:
                return await self._run_as(user, program)
        except OSError as error:
            raise ProgramError(str(error)) from error

    async def _run_as(self, user: SandboxUser, program: Program) -> Ended:
        result = None
        async with self._fresh.of(program, user.uid) as workspace:
            report = await self._supervisors.run(self._orders(program, workspace, user), user.lock)
            lacked_room = await asyncio.to_thread(others_filled_disk, workspace.root)
            if program.result is not None:
                result = await asyncio.to_thread(read_result, workspace.work, program.result)
            kept = await asyncio.to_thread(read_artifacts, workspace.work, program.artifacts)
        if not report["all_dead"]:
            log.warning("a process of a program survived SIGKILL", program=program.name)
        contained = user.uid is not None or self._landlock >= SIGNAL_LANDLOCK
        names = self._place.names
        return ended_of(report, names, contained=contained, lacked_room=lacked_room, result=result, kept=kept)

    async def close(self) -> None:
        """Removes the folder of this process's workspaces."""
        await asyncio.to_thread(self._workspaces.close)

    def _orders(self, program: Program, workspace: Workspace, user: SandboxUser) -> Orders:
        if not program.network and not self._can_filter:
            raise PermissionError("this kernel has no seccomp filters, so that nothing closes the network")
        first, *rest = program.command
        command = [self._place.python if first == "{python}" else first, *rest]
        if user.uid is not None:
            self._check_reachable(user.uid, command, workspace)
        seen = workspace if self._rights is None else workspace.shown_at(self._seen_at)
        environment = self._environment(program, seen, user)
        return {
            "command": command,
            "environment": environment,
            "stdin": str(workspace.task_file) if program.document_on_stdin else os.devnull,
            "folder": str(seen.work),
            "timeout_seconds": program.timeout_seconds,
            "grace_seconds": self._place.grace_seconds,
            "output_bytes": program.output_bytes,
            "memory_bytes": program.memory_bytes,
            "memory_poll_seconds": supervisor.MEMORY_POLL_SECONDS,
            "limits": self._limits(program, user),
            "sandbox": self._sandbox(
                program, user, seen, self._view(workspace, program.memory_bytes, texts_with_paths(command, environment))
            ),
        }

    def _check_reachable(self, uid: int, command: list[str], workspace: Workspace) -> None:
        """Raises: PermissionError: the program's user cannot pass to it, an argument, or its workspace"""
        path = shutil.which(command[0], path=self._place.path) or command[0]
        named = [one for one in (path, *command[1:]) if one.startswith("/") and os.path.lexists(one)]
        closed = closed_to(uid, [str(workspace.root), *named])
        if closed is not None:
            program = self._place.names.program
            raise PermissionError(f"{closed} is closed to the user that the {program} becomes: {REMEDIES}")

    def _environment(self, program: Program, workspace: Workspace, user: SandboxUser) -> dict[str, str]:
        # For programs that ask for their user's name: a uid of one program has none.
        user_names = {"USER": "agent", "LOGNAME": "agent"} if user.uid is not None else {}
        return {
            "PATH": self._place.path,
            "HOME": str(workspace.work),
            "TMPDIR": str(workspace.scratch),
            **user_names,
            **program.environment,
            program.document_variable: str(workspace.task_file),
            **({program.files_variable: str(workspace.files)} if program.files_variable else {}),
        }

    def _limits(self, program: Program, user: SandboxUser) -> list[tuple[int, int, int]]:
        cpu, place = program.cpu_seconds, self._place
        bounds = [
            (resource.RLIMIT_CORE, 0, 0),
            # SIGXCPU at the first, SIGKILL at the second.
            (resource.RLIMIT_CPU, cpu, cpu and cpu + 5),
            (resource.RLIMIT_NOFILE, place.max_open_files, place.max_open_files),
            (resource.RLIMIT_FSIZE, place.max_file_bytes, place.max_file_bytes),
        ]
        if user.uid is not None:
            bounds.append((resource.RLIMIT_NPROC, place.max_processes, place.max_processes))
        return [(number, soft, hard) for number, soft, hard in bounds if soft is not None and hard is not None]

    def _view(self, workspace: Workspace, memory_bytes: int | None, texts: list[str]) -> View | None:
        if self._rights is None:
            return None
        return view_of(
            workspace.root,
            workspace.scratch,
            workspace.lasting,
            memory_bytes,
            self._seen_at,
            texts,
            self._workspaces.room,
            self._rights,
        )

    def _sandbox(self, program: Program, user: SandboxUser, seen: Workspace, view: View | None) -> Sandbox:
        # Without capabilities root still owns every file of root: by `/proc/sys` alone it could take the machine over.
        stays_root = user.uid is None and os.geteuid() == 0
        return {
            "uid": user.uid,
            "landlock": self._landlock >= USABLE_LANDLOCK,
            "hidden": [path for path in self._hidden if Path(path).exists()],
            "visible": os.path.realpath(seen.root),
            "filter": self._can_filter,
            "network": program.network,
            "view": view,
            "writable": [os.path.realpath(folder) for folder in WRITABLE_BY_ROOT] if stays_root else None,
        }
