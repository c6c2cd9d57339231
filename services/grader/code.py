"""Runs graders of the operator's own code in the sandbox of agents: one that fails, for any reason, gives no 0."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from leyden.libs.contracts.config.graders import Command, PythonFunction
from leyden.libs.contracts.states import ComponentState
from leyden.libs.grading.grade import Grade, cut
from leyden.libs.grading.pool import Graded
from leyden.libs.grading.verdict import NAME, grade_of_verdict
from leyden.libs.sandbox.ended import Ended
from leyden.libs.sandbox.place import Names, Place
from leyden.libs.sandbox.program import Program
from leyden.libs.sandbox.programs import Programs
from leyden.libs.sandbox.supervisor import become_subreaper
from leyden.libs.sandbox.supervisors import ProgramError
from leyden.libs.service.errors import Misconfigured
from leyden.services.grader import function
from leyden.services.grader.settings import Settings

NAMES = Names(
    program="grader",
    prefix="GRADER",
    kind="CODE",
    directory="directory",
    remedy="`leyden up --graders DIR`",
    memory="memory_bytes",
)
FILES = "LEYDEN_ARTIFACTS"
"""The variable that names the folder with the files that the agent left."""
NO_FILES: Mapping[str, bytes] = MappingProxyType({})
OUTPUT_BYTES = 256 * 1024
"""The end of stdout and of stderr that is read."""
SHOWN_BYTES = 300
"""The end of stderr in an explanation."""


def place_of(settings: Settings) -> Place:
    """The place of graders that the settings describe."""
    return Place(
        names=NAMES,
        work_folder=settings.work_folder,
        hidden_paths=(*settings.hidden_paths, settings.capability_keys_file),
        roots=settings.code_roots,
        max_directory_bytes=settings.max_directory_bytes,
        path=settings.code_path,
        python=settings.python,
        user=settings.code_user,
        uids_from=settings.code_uids_from,
        max_file_bytes=2**30,
        grace_seconds=0.5,
    )


class Code:
    """Grades while it is open.

    Args: spared: children of this process that are no graders of this kind
    """

    def __init__(self, settings: Settings, spared: Callable[[], Collection[int]] = tuple) -> None:
        self._settings = settings
        self._spared = spared
        self._room = asyncio.Semaphore(settings.code_processes)
        self._programs: Programs | None = None
        self._source = Path(function.__file__).read_text()

    async def grade(
        self,
        grader: PythonFunction | Command,
        name: str,
        document: Mapping[str, Any],
        files: Mapping[str, bytes] = NO_FILES,
    ) -> Graded:
        """Returns the grade; one that has failed may be tried again.

        Args: name: of the attempt; document: its task and its rollout; files: those that its agent left, by their paths
        """
        if not self._settings.code_processes:
            cause = "this grader runs no code of your own (GRADER_CODE_PROCESSES is 0)"
            return Graded(Grade(ComponentState.FAILED, explanation=cause), 0.0)
        async with self._room:
            began = time.perf_counter()
            try:
                ended = await self._opened().run(self._program(grader, name, document, files))
                return Graded(_grade_of(grader, ended), time.perf_counter() - began)
            except (ProgramError, Misconfigured, ValueError) as error:
                failed = Grade(ComponentState.FAILED, explanation=cut(str(error)))
                return Graded(failed, time.perf_counter() - began, crashed=True)

    async def close(self) -> None:
        """Removes the folders of graders. None runs any more."""
        if self._programs is not None:
            await self._programs.close()

    def _opened(self) -> Programs:
        """With the first grading: a grader without code needs no sandbox, and may have no place for one.

        Raises: Misconfigured
        """
        if self._programs is None:
            become_subreaper()
            owner = f"grader-{socket.gethostname()}-{os.getpid()}"
            self._programs = Programs(place_of(self._settings), owner, self._spared)
        return self._programs

    def _program(
        self, grader: PythonFunction | Command, name: str, document: Mapping[str, Any], files: Mapping[str, bytes]
    ) -> Program:
        if isinstance(grader, Command):
            command = list(grader.command)
        else:
            command = ["{python}", "-c", self._source, grader.function]
        return Program(
            name=name,
            command=command,
            environment={"LANG": "C.UTF-8"},
            document=document,
            document_variable="LEYDEN_GRADING_FILE",
            document_on_stdin=True,
            timeout_seconds=grader.timeout_seconds,
            output_bytes=OUTPUT_BYTES,
            memory_bytes=grader.memory_bytes,
            directory=grader.directory,
            network=grader.network,
            result=NAME,
            files=files,
            files_variable=FILES,
        )


def _grade_of(grader: PythonFunction | Command, ended: Ended) -> Grade:
    """The grade of a program that ended by itself with 0. Raises: ValueError: the grader has failed"""
    if ended.timed_out:
        raise ValueError(f"it took longer than {grader.timeout_seconds:g} s (timeout_seconds)")
    if cause := ended.limit_exceeded or ended.platform_failure:
        raise ValueError(cause)
    if ended.exit_code != 0:
        code = ended.exit_code or 0
        how = f"it was ended by signal {-code}" if code < 0 else f"it exited with {code}"
        said = ended.stderr[-SHOWN_BYTES:].decode(errors="replace").strip()
        raise ValueError(f"{how}: {said}" if said else how)
    return grade_of_verdict(ended.result, ended.stdout)
