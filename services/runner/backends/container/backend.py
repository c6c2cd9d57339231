"""Executes each attempt in a container of this machine. A supervisor of `libs/sandbox` watches the container's client.

A container has its own root, processes and limits; its name and labels let the next runner find those of a dead one.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from leyden.libs.containers.client import ContainerClient, ContainerError, last_words
from leyden.libs.contracts.config import ContainerRunner
from leyden.libs.sandbox.artifacts import read_artifacts
from leyden.libs.sandbox.ended import SHELL_SIGKILL, Ended, ended_of
from leyden.libs.sandbox.fresh import FreshWorkspaces
from leyden.libs.sandbox.supervisor import MEMORY_POLL_SECONDS
from leyden.libs.sandbox.supervisors import ProgramError, Supervisors
from leyden.libs.sandbox.users import SandboxUser, SandboxUsers, sandbox_users
from leyden.libs.sandbox.workspace import Workspace, Workspaces, is_locked, others_filled_disk
from leyden.libs.telemetry import logger
from leyden.services.runner.backends.base import AttemptSpec, BackendError, out_of_memory
from leyden.services.runner.backends.container.creation import OWNER, WORK_FOLDER, Creation
from leyden.services.runner.backends.machine import NAMES, WithoutSurvivors, place_of, program_of
from leyden.services.runner.settings import Settings

if TYPE_CHECKING:
    from leyden.libs.sandbox.supervisor import Orders, Report

log = logger()

NO_SUCH = "no such container"
NEVER_STARTED = "0001-"
"""The beginning of the time of a container's start that never was."""


class ContainerBackend(WithoutSurvivors):
    """The attempts of one runner in containers of this machine.

    Args: owner: the name of the runner
    """

    def __init__(self, settings: Settings, owner: str) -> None:
        self._settings = settings
        self._owner = f"{owner}-containers"
        self._client = ContainerClient(settings.container_program)
        # The interpreter lies in the image, where every user can reach it.
        self._place = replace(place_of(settings), python="/bin/sh")
        self._work_folder = os.path.realpath(settings.work_folder)
        self._supervisors = Supervisors()
        self._workspaces: Workspaces | None = None

    async def check(self) -> None:
        """Does nothing: without podman or docker each attempt fails with the remedy, and other agents need neither."""

    async def remove_abandoned(self) -> None:
        """Removes the containers of runners that are gone, where podman or docker is installed and answers."""
        if self._client.program is None:
            return
        label = f"label={WORK_FOLDER}={self._work_folder}"
        try:
            found = await self._client.call("ps", "--all", "--quiet", "--no-trunc", "--filter", label)
        except ContainerError as error:
            log.warning("containers of earlier runners not looked for", cause=str(error))
            return
        for name in found.split():
            if await self._is_abandoned(name):
                log.info("abandoned container removed", container=name)
                await self._remove(name)

    async def run(self, spec: AttemptSpec) -> Ended:
        """Runs the agent to its end and removes its container, also when cancelled.

        Raises: BackendError: an image that the operator refuses or that has volumes, no podman or docker, no image, no
            start, or an unknown end
        """
        assert isinstance(spec.limits, ContainerRunner)
        if refused := self._settings.agent_rules.refusals(spec.limits):
            raise BackendError("; ".join(refused))
        try:
            await self._client.provide(spec.limits.image, self._settings.start_seconds)
            await self._refuse_volumes(spec.limits.image)
            with self._users.lend() as user:
                async with self._fresh.of(program_of(spec), user.uid) as workspace:
                    return await self._run_in(workspace, spec, user)
        except (ContainerError, ProgramError, OSError) as error:
            raise BackendError(str(error)) from error

    async def close(self) -> None:
        """Removes the folder of this runner's workspaces."""
        if self._workspaces is not None:
            await asyncio.to_thread(self._workspaces.close)

    # The first container needs them, and most runners start none.
    @cached_property
    def _users(self) -> SandboxUsers:
        return sandbox_users(self._place)

    @cached_property
    def _fresh(self) -> FreshWorkspaces:
        folder = self._settings.work_folder
        self._workspaces = Workspaces(folder, self._owner, "RUNNER_WORK_FOLDER")
        hidden = [*map(os.path.realpath, self._place.hidden_paths), self._work_folder]
        return FreshWorkspaces(self._place, self._workspaces, hidden)

    async def _refuse_volumes(self, image: str) -> None:
        """Raises: BackendError: docker would give the agent volumes of the image, outside its workspace"""
        if self._client.is_podman:
            return
        volumes = await self._client.call("image", "inspect", "--format", "{{json .Config.Volumes}}", image)
        # An attempt has a /tmp of its own in its place.
        if beside := sorted((json.loads(volumes) or {}).keys() - {"/tmp"}):  # noqa: S108
            raise BackendError(
                f"image {image} declares volumes ({', '.join(beside)}), in which docker lets an agent write outside its"
                " workspace: build it without VOLUME, or install podman, which can leave them out"
            )

    async def _run_in(self, workspace: Workspace, spec: AttemptSpec, user: SandboxUser) -> Ended:
        creation = Creation(
            spec=spec,
            owner=self._owner,
            workspace=workspace,
            place=self._settings.work_folder / "attempt",
            uid=user.uid,
            podman=self._client.is_podman,
            settings=self._settings,
        )
        lines, passed = creation.variables()
        try:
            creation.variables_file.touch(0o600, exist_ok=False)
            creation.variables_file.write_text(lines, encoding="utf-8")
            await self._client.call(*creation.arguments(passed), passed=passed)
            report = await self._supervisors.run(self._orders(creation), user.lock)
            lacked_memory = await self._lacked_memory(creation.name, report)
        finally:
            await asyncio.shield(self._remove(creation.name))
        lacked_room = await asyncio.to_thread(others_filled_disk, workspace.root)
        kept = await asyncio.to_thread(read_artifacts, workspace.work, spec.artifacts)
        ended = ended_of(report, NAMES, contained=True, lacked_room=lacked_room, kept=kept)
        return replace(ended, platform_failure=out_of_memory(NAMES.memory)) if lacked_memory else ended

    def _orders(self, creation: Creation) -> Orders:
        spec = creation.spec
        stdin = ["--interactive"] if spec.task_on_stdin else []
        return {
            "command": self._client.command("start", "--attach", *stdin, creation.name),
            "environment": self._client.environment(),
            "stdin": str(creation.workspace.task_file) if spec.task_on_stdin else os.devnull,
            "folder": "/",
            "timeout_seconds": spec.limits.timeout_seconds,
            "grace_seconds": self._settings.grace_seconds,
            "output_bytes": spec.limits.output_bytes,
            "memory_bytes": None,
            "memory_poll_seconds": MEMORY_POLL_SECONDS,
            "limits": [],
            "sandbox": None,
        }

    async def _lacked_memory(self, name: str, report: Report) -> bool:
        """Whether the agent failed after the kernel had ended a process of it for want of memory.

        Raises: BackendError: the container never started, or its client ended before it
        """
        if report["exit_code"] == 0 or report["timed_out"]:
            return False
        state = await self._client.state(name)
        words = last_words(report["stderr"].decode(errors="replace"))
        if state["StartedAt"].startswith(NEVER_STARTED):
            raise BackendError(f"the agent could not be started: {words}")
        if state["Running"]:
            raise BackendError(f"the client of the agent's container ended before it: {words}")
        # With version 1 of cgroups podman says no word of it.
        return bool(state["OOMKilled"]) or (report["exit_code"] == SHELL_SIGKILL and bool(report["lacked_memory"]))

    async def _remove(self, name: str) -> None:
        try:
            await self._client.call("rm", "--force", "--volumes", name)
        except ContainerError as error:
            if NO_SUCH not in str(error).lower():
                log.warning("container not removed, the next runner tries again", container=name, cause=str(error))

    async def _is_abandoned(self, name: str) -> bool:
        """Whether the runner of a container is dead: the lock of its folder is free."""
        try:
            line = f'{{{{index .Config.Labels "{OWNER}"}}}}'
            owner = (await self._client.call("inspect", "--format", line, name)).strip()
        except ContainerError as error:
            # Another runner that starts removes them, too.
            log.info("container not looked at", container=name, cause=str(error))
            return False
        return not is_locked(self._settings.work_folder / owner)
