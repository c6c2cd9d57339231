"""Attempts as process trees of this machine, in the sandbox of `libs/sandbox`, for agents whose code is trusted."""

from __future__ import annotations

from leyden.libs.contracts.config import ProcessRunner
from leyden.libs.sandbox.ended import Ended
from leyden.libs.sandbox.place import Names, Place
from leyden.libs.sandbox.programs import Program, Programs
from leyden.libs.sandbox.supervisors import ProgramError
from leyden.services.runner.backends.base import AttemptSpec, BackendError
from leyden.services.runner.settings import Settings

NAMES = Names(
    program="agent",
    prefix="RUNNER",
    kind="AGENT",
    directory="agent.directory",
    remedy="`leyden up --agents DIR`",
    memory="runner.memory_bytes",
)


def place_of(settings: Settings) -> Place:
    """The place of agents that the runner's settings describe."""
    return Place(
        names=NAMES,
        work_folder=settings.work_folder,
        hidden_paths=(*settings.hidden_paths, settings.capability_keys_file),
        roots=settings.agent_roots,
        max_directory_bytes=settings.max_directory_bytes,
        path=settings.agent_path,
        python=settings.python,
        user=settings.agent_user,
        uids_from=settings.agent_uids_from,
        max_open_files=settings.max_open_files,
        max_processes=settings.max_processes,
        max_file_bytes=settings.max_file_bytes,
        grace_seconds=settings.grace_seconds,
    )


class ProcessBackend:
    """The attempts of one runner on this machine.

    Args: owner: the name of the runner and of its folder of workspaces.
    Raises: Misconfigured: a setting cannot be followed here
    """

    def __init__(self, settings: Settings, owner: str) -> None:
        self._programs = Programs(place_of(settings), owner)

    async def check(self) -> None:
        """Starts RUNNER_PYTHON once, as agents are started. From now on this process adopts their orphans.

        Raises: Misconfigured: it does not run; the message names the remedy
        """
        await self._programs.check()

    async def run(self, spec: AttemptSpec) -> Ended:
        """Runs the agent to its end. Cancelling kills its process tree and waits until it is dead.

        Raises: BackendError: no workspace, no user, no start, or a lost supervisor
        """
        try:
            return await self._programs.run(program_of(spec))
        except ProgramError as error:
            raise BackendError(str(error)) from error

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
        await self._programs.close()


def program_of(spec: AttemptSpec) -> Program:
    """The program of an attempt's agent."""
    limits = spec.limits
    assert isinstance(limits, ProcessRunner)
    return Program(
        name=spec.name,
        command=spec.command,
        environment={**spec.environment, **spec.secrets},
        document=spec.task,
        document_variable="LEYDEN_TASK_FILE",
        document_on_stdin=spec.task_on_stdin,
        document_name=spec.task_file,
        directory=spec.directory,
        timeout_seconds=limits.timeout_seconds,
        output_bytes=limits.output_bytes,
        memory_bytes=limits.memory_bytes,
        cpu_seconds=limits.cpu_seconds,
        artifacts=spec.artifacts,
    )
