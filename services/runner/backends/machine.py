"""Agents of this machine, in processes and in containers: their place and their programs."""

from __future__ import annotations

from leyden.libs.contracts.config import ContainerRunner, ProcessRunner, RunnerConfig
from leyden.libs.sandbox.place import Names, Place
from leyden.libs.sandbox.program import Program
from leyden.services.runner.backends.base import AttemptSpec
from leyden.services.runner.settings import Settings

NAMES = Names(
    program="agent",
    prefix="RUNNER",
    kind="AGENT",
    directory="agent.directory",
    remedy="`leyden up --agents DIR`",
    memory="runner.memory_bytes",
)


class WithoutSurvivors:
    """A backend whose agents end with their runner, or are removed when the next one starts."""

    agents_outlive_runner = False

    async def survivors(self) -> list[tuple[str, int]]:
        """None."""
        return []

    async def discard(self, rollout_id: str, attempt: int) -> None:
        """Does nothing, as there are no survivors."""

    async def remove(self, rollout_id: str, attempt: int, limits: RunnerConfig) -> None:
        """Does nothing: `run` has removed it."""


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


def program_of(spec: AttemptSpec) -> Program:
    """The program of an attempt's agent."""
    limits = spec.limits
    assert isinstance(limits, ProcessRunner | ContainerRunner)
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
