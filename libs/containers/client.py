"""Podman or docker, by the commands and options on which both agree."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

PROGRAMS = ("podman", "docker")
CONTAINER_PROGRAM = "RUNNER_CONTAINER_PROGRAM"
"""The runner's setting that names one of them, or its path."""
NONE_INSTALLED = (
    "neither podman nor docker is installed on the runner's machine: install one (Debian: apt-get install podman), or"
    " name its path in RUNNER_CONTAINER_PROGRAM, and start the platform again"
)
NO_DAEMON = "start docker's daemon (systemctl start docker) and let the runner's user reach it, or install podman"

_OWN_NAMES = frozenset({"PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "DBUS_SESSION_BUS_ADDRESS", "REGISTRY_AUTH_FILE"})
_OWN_PREFIXES = ("XDG_", "DOCKER_", "CONTAINER_", "CONTAINERS_", "STORAGE_")
_PROXIES = frozenset({"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"})
CALL_SECONDS = 120.0
"""The longest wait for an answer, on a busy disk."""


class ContainerError(Exception):
    """A call failed; the message has the program's last words, and the remedy."""


class ContainerClient:
    """The program that makes containers.

    Args: program: its name or path; None for the first of `PROGRAMS` that is installed
    """

    def __init__(self, program: str | None) -> None:
        self._names = PROGRAMS if program is None else (program,)
        self._pulls: dict[str, asyncio.Lock] = {}

    @property
    def program(self) -> str | None:
        """Its path; None where it is not installed."""
        return next((path for name in self._names if (path := shutil.which(name)) is not None), None)

    @property
    def is_podman(self) -> bool:
        """Whether it is podman, which an ordinary user runs without a daemon."""
        return os.path.basename(self.command()[0]) == "podman"  # noqa: PTH119  # a name, and no file is looked at

    def command(self, *arguments: str) -> list[str]:
        """The words of a call. Raises: ContainerError: it is not installed"""
        program = self.program
        if program is None:
            raise ContainerError(NONE_INSTALLED)
        return [program, *arguments]

    def environment(self, passed: Mapping[str, str] | None = None) -> dict[str, str]:
        """The variables of the program: its own settings and nothing of the platform's. Args: passed: further ones"""
        own = {
            name: value for name, value in os.environ.items() if name in _OWN_NAMES or name.startswith(_OWN_PREFIXES)
        }
        return {**own, **(passed or {})}

    async def call(
        self, *arguments: str, passed: Mapping[str, str] | None = None, seconds: float = CALL_SECONDS
    ) -> str:
        """Returns the standard output of a call, which goes on to its end where the caller is cancelled.

        Raises: ContainerError: it failed, with its last words and the remedy
        """
        calling = asyncio.ensure_future(
            asyncio.to_thread(_call, self.command(*arguments), self.environment(passed), seconds)
        )
        try:
            return await asyncio.shield(calling)
        except asyncio.CancelledError:
            # Two calls about one container may not overlap: the second would find it half made.
            await asyncio.wait([calling])
            calling.exception()
            raise

    async def provide(self, image: str, seconds: float) -> None:
        """Pulls an image that this machine lacks; one call at a time for each image.

        Raises: ContainerError: it is not there, and no registry gives it in time
        """
        async with self._pulls.setdefault(image, asyncio.Lock()):
            try:
                await self.call("image", "inspect", "--format", "{{.Id}}", image)
                return
            except ContainerError as error:
                if NO_DAEMON in str(error):
                    raise
            proxies = {name: value for name, value in os.environ.items() if name.upper() in _PROXIES}
            try:
                await self.call("pull", "--quiet", image, passed=proxies, seconds=seconds)
            except ContainerError as error:
                name = self.command()[0]
                raise ContainerError(
                    f"image {image} is not on the runner's machine, and no registry gave it ({error}): build it or load"
                    f" it there as the runner's user ({name} build, {name} load), or sign in ({name} login)"
                ) from error

    async def state(self, container: str) -> Mapping[str, Any]:
        """How a container ended: `OOMKilled`, `ExitCode`, `StartedAt`, `Running`, `Error`.

        Raises: ContainerError: it is gone
        """
        found: Mapping[str, Any] = json.loads(await self.call("inspect", "--format", "{{json .State}}", container))
        return found


def _call(command: list[str], environment: dict[str, str], seconds: float) -> str:
    """Raises: ContainerError"""
    try:
        ended = subprocess.run(
            command,
            env=environment,
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=seconds,
            # An interrupt of the terminal is not for it. In a session of its own it would look like a process that a
            # lost supervisor left, which is killed.
            process_group=0,
        )
    except subprocess.TimeoutExpired as error:
        raise ContainerError(f"`{' '.join(command[:2])}` did not end within {seconds:g} s") from error
    except OSError as error:
        raise ContainerError(f"{command[0]} cannot be started: {error}") from error
    if ended.returncode != 0:
        raise ContainerError(f"`{' '.join(command[:2])}`: {last_words(ended.stderr)}")
    return ended.stdout


def last_words(stderr: str) -> str:
    """The last line of an error output, with the remedy where docker has no daemon."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    words = lines[-1] if lines else "it failed without a word"
    no_daemon = any("docker daemon" in line.lower() or "docker.sock" in line for line in lines)
    return f"{words}: {NO_DAEMON}" if no_daemon else words
