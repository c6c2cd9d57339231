"""The seam between the runner and the place that executes attempts: plain data in, plain data out.

A backend knows nothing of leases, rewards or the store. It tells apart its own failure (`BackendError`,
`Ended.platform_failure`) and the agent's (every other `Ended`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from leyden.libs.contracts.config import RunnerConfig
from leyden.libs.sandbox.ended import Ended


@dataclass(frozen=True)
class AttemptSpec:
    """One attempt, as a backend executes it.

    Args: name: unique among living attempts, fit for a file name; command: program and arguments, no shell, `{python}`
        as first word for the backend's interpreter; environment: every variable but those that depend on the place
        (PATH, HOME, TMPDIR, LEYDEN_TASK_FILE), which the backend adds; secrets: more variables, which hold the
        attempt's key and stay out of arguments, logs and readable files; task: the content of LEYDEN_TASK_FILE;
        task_file: one more file with it, a name in the working folder or a path in the pod; task_on_stdin: the agent
        reads it from stdin, too; artifacts: patterns of files to keep; directory: a folder that the backend copies into
        the fresh working folder; limits: `runner` of the run document; labels: `run`, `rollout` and `attempt`, for
        people and selectors; adopted: the agent is at work already, and its runner is gone.
    """

    name: str
    command: list[str]
    environment: Mapping[str, str]
    secrets: Mapping[str, str]
    task: Mapping[str, Any]
    directory: str | None
    limits: RunnerConfig
    labels: Mapping[str, str] = field(default_factory=dict)
    adopted: bool = False
    task_file: str | None = None
    task_on_stdin: bool = False
    artifacts: Sequence[str] = ()


def out_of_memory(limit: str) -> str:
    """The reason of an attempt that failed after the kernel had ended a process of the agent for want of memory.

    Podman, docker and a kubelet say so alike whether the agent exceeded its own limit or its machine had none left.
    The platform's failure, then: it never trains. Args: limit: the field that bounds the agent
    """
    return (
        f"the kernel ended the agent for want of memory: its own limit ({limit}) or the machine's, nobody says which."
        " Raise the limit, or let fewer agents run at once on a machine"
    )


class BackendError(Exception):
    """The backend could not start the agent or lost it. The attempt is repeated and never trained."""


class Backend(Protocol):
    """A place that executes attempts."""

    agents_outlive_runner: bool
    """Whether agents stay at work when `run` is cancelled, for another runner to watch."""

    async def check(self) -> None:
        """Starts one trivial agent.

        Raises: Misconfigured: no agent can start here; the message names the remedy
        """

    async def run(self, spec: AttemptSpec) -> Ended:
        """Runs the agent until it ends, then removes its processes and files. A cancellation kills the agent first.

        An agent that can outlive its runner stays, with all that it has: another runner may watch it by now.

        Raises: BackendError: the agent did not run, or its end is unknown
        """

    async def remove(self, rollout_id: str, attempt: int, limits: RunnerConfig) -> None:
        """Stops the agent of an attempt whose outcome counts, and removes what `run` left of it."""

    async def survivors(self) -> list[tuple[str, int]]:
        """Returns rollout and attempt of agents at work that no `run` of this process watches.

        None where agents die with their runner.
        """

    async def discard(self, rollout_id: str, attempt: int) -> None:
        """Stops an agent of `survivors` that nobody wants."""

    async def close(self) -> None:
        """Removes everything that this backend made. No attempt runs any more."""
