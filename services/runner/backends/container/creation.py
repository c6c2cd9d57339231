"""The words and variables of the call that creates an attempt's container."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from leyden.libs.contracts.config import ContainerRunner
from leyden.libs.contracts.config.runners import reserved_names
from leyden.libs.sandbox.workspace import Workspace
from leyden.services.runner.backends.base import AttemptSpec, BackendError
from leyden.services.runner.settings import Settings

RUN, ROLLOUT, ATTEMPT = "leyden.dev/run", "leyden.dev/rollout", "leyden.dev/attempt"
OWNER, WORK_FOLDER = "leyden.dev/owner", "leyden.dev/work-folder"
"""The labels of a container: whose it is, for people; the runner that watches it, and its work folder."""
MAX_LINE = 60_000
"""Docker reads no longer line of a file with variables."""
_NAME = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)


@dataclass(frozen=True)
class Creation:
    """A container that is to be created.

    Args: place: the folder in the container where the agent finds its workspace; uid: its own user's, None for that of
        the runner; podman: whether podman makes it
    """

    spec: AttemptSpec
    owner: str
    workspace: Workspace
    place: Path
    uid: int | None
    podman: bool
    settings: Settings

    @property
    def name(self) -> str:
        """The container's."""
        return f"leyden-{self.spec.name}"

    @property
    def variables_file(self) -> Path:
        """A file with the agent's variables, which its user cannot read or replace."""
        return self.workspace.root / "variables"

    def arguments(self, passed: Mapping[str, str]) -> list[str]:
        """Program and options. Args: passed: variables that the container takes from the caller's"""
        first, *rest = self.spec.command
        first = "python" if first == "{python}" else first
        runner = self.spec.limits
        assert isinstance(runner, ContainerRunner)
        return [
            *("create", "--name", self.name, "--pull=never", f"--entrypoint={first}"),
            *(f"--label={name}={value}" for name, value in self._labels().items()),
            *self._bounds(runner),
            *self._files(),
            *(f"--env={name}" for name in passed),
            *(("--interactive",) if self.spec.task_on_stdin else ()),
            *(runner.image, *rest),
        ]

    def variables(self) -> tuple[str, dict[str, str]]:
        """The agent's variables: lines of a file, and those that are too long or have several lines.

        The second ones become variables of podman or docker themselves, so that only names of the platform may be
        among them: `LD_PRELOAD`, say, would change the program that creates the container.

        Raises: BackendError: a variable of the run fits neither
        """
        lines, passed = [], {}
        for name, value in self._environment().items():
            if not _NAME.fullmatch(name):
                raise BackendError(f"agent.environment: no container takes a variable named {name!r}: rename it")
            if len(value.encode()) <= MAX_LINE and not {"\n", "\r"}.intersection(value):
                lines.append(f"{name}={value}\n")
            elif reserved_names([name]):
                passed[name] = value
            else:
                raise BackendError(
                    f"agent.environment.{name}: a container takes one line of at most {MAX_LINE} bytes: write longer"
                    " text into a file of agent.directory or of the image"
                )
        return "".join(lines), passed

    def _environment(self) -> dict[str, str]:
        seen = self.workspace.shown_at(self.place)
        user = {} if self.uid is None else {"USER": "agent", "LOGNAME": "agent"}
        place = {"HOME": str(seen.work), "TMPDIR": str(seen.scratch), **user}
        own = {**self.spec.environment, **self.spec.secrets}
        return {**place, **own, "LEYDEN_TASK_FILE": str(seen.task_file)}

    def _labels(self) -> dict[str, str]:
        ours = zip((RUN, ROLLOUT, ATTEMPT), ("run", "rollout", "attempt"), strict=True)
        of_attempt = {label: self.spec.labels[name] for label, name in ours if name in self.spec.labels}
        return {**of_attempt, OWNER: self.owner, WORK_FOLDER: os.path.realpath(self.settings.work_folder)}

    def _files(self) -> list[str]:
        """The workspace at its place, its scratch folder as /tmp, and nothing else that can be written."""
        seen = self.workspace.shown_at(self.place)
        return [
            "--read-only",
            # Docker has no such option: the backend refuses its images with volumes.
            *(("--image-volume=ignore",) if self.podman else ()),
            f"--volume={self.workspace.root}:{self.place}:Z",
            f"--volume={self.workspace.scratch}:/tmp:Z",
            f"--workdir={seen.work}",
            f"--env-file={self.variables_file}",
            # The runner reads the output itself.
            "--log-driver=none",
        ]

    def _bounds(self, runner: ContainerRunner) -> list[str]:
        uid, gid = (os.getuid(), os.getgid()) if self.uid is None else (self.uid, self.uid)
        is_ordinary = self.podman and os.geteuid() != 0
        memory = runner.memory_bytes
        return [
            f"--user={uid}:{gid}",
            *(("--userns=keep-id",) if is_ordinary else ()),
            "--cap-drop=all",
            # `rm --force` kills at once.
            "--stop-timeout=0",
            "--security-opt=no-new-privileges",
            f"--network={self.settings.container_network}",
            # When memory is short, the kernel ends agents before anything of the platform.
            "--oom-score-adj=1000",
            f"--pids-limit={self.settings.max_processes or -1}",
            # Without swap beyond its memory.
            *((f"--memory={memory}", f"--memory-swap={memory}") if memory is not None else ()),
            *(f"--ulimit={name}={soft}:{hard}" for name, soft, hard in self._ulimits(runner)),
        ]

    def _ulimits(self, runner: ContainerRunner) -> Iterator[tuple[str, int, int]]:
        """Name, soft and hard limit, none above the runner's own, which it may lack the right to raise."""
        yield "core", 0, 0
        files, length = self.settings.max_open_files, self.settings.max_file_bytes
        processes = self.settings.max_processes if self.uid is not None else None
        asked = (("nofile", resource.RLIMIT_NOFILE, files), ("nproc", resource.RLIMIT_NPROC, processes))
        for name, number, most in asked:
            own = resource.getrlimit(number)[1]
            bounds = [bound for bound in (most, own) if bound is not None and bound != resource.RLIM_INFINITY]
            if bounds:
                yield name, min(bounds), min(bounds)
        if length is not None:
            yield "fsize", length, length
        if runner.cpu_seconds is not None:
            # SIGXCPU at the first, SIGKILL at the second.
            yield "cpu", runner.cpu_seconds, runner.cpu_seconds + 5
