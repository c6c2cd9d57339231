"""Attempts as process trees of this machine, in the sandbox of `libs/sandbox`, for agents whose code is trusted."""

from __future__ import annotations

from leyden.libs.sandbox.ended import Ended
from leyden.libs.sandbox.programs import Programs
from leyden.libs.sandbox.supervisors import ProgramError
from leyden.services.runner.backends.base import AttemptSpec, BackendError
from leyden.services.runner.backends.machine import WithoutSurvivors, place_of, program_of
from leyden.services.runner.settings import Settings


class ProcessBackend(WithoutSurvivors):
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

    async def close(self) -> None:
        """Removes the folder of this runner's workspaces."""
        await self._programs.close()
