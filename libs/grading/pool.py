"""A bounded pool of processes that run built-in graders. One that hangs or crashes ends alone and is started again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from leyden.libs.contracts.config import Component
from leyden.libs.contracts.states import ComponentState
from leyden.libs.grading.facts import AttemptFacts
from leyden.libs.grading.grade import Grade, worst

CHILD = "leyden.libs.grading.child"
LINE_BYTES = 2**20
"""The longest answer of a process; grades cut their texts far below it."""


@dataclass(frozen=True)
class Graded:
    """The grade of one component. `crashed`: its process ended, so that another try may succeed."""

    grade: Grade
    seconds: float
    crashed: bool = False


class Pool:
    """Grades while it is open.

    Args: component_seconds: the limit on the processor time of a component's two parts, the task's and the agent's
    """

    def __init__(self, processes: int, component_seconds: float) -> None:
        self._seconds = component_seconds
        self._idle: asyncio.LifoQueue[_Child] = asyncio.LifoQueue()
        self._children = [_Child() for _ in range(processes)]
        for child in self._children:
            self._idle.put_nowait(child)

    def pids(self) -> list[int]:
        """The processes that have been started."""
        return [pid for child in self._children if (pid := child.pid) is not None]

    async def grade(self, components: Sequence[Component], facts: AttemptFacts) -> list[Graded]:
        """Returns the grades in the order of the components."""
        graded: list[Graded] = []
        child = await self._idle.get()
        try:
            while len(graded) < len(components):
                graded += await child.grade(components[len(graded) :], facts, self._seconds)
        finally:
            self._idle.put_nowait(child)
        return graded

    async def close(self) -> None:
        """Ends the processes."""
        for child in self._children:
            await child.end()


class _Child:
    """One process, started with its first request."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Null before the first request."""
        return self._process.pid if self._process else None

    async def grade(self, components: Sequence[Component], facts: AttemptFacts, seconds: float) -> list[Graded]:
        """Returns grades in order, up to the first component that ended the process."""
        graded: list[Graded] = []
        is_whole = False
        try:
            process = self._process = self._process or await _start()
            await _send(process, components, facts, seconds)
            for component in components:
                line = await _read(process)
                if not line:
                    return [*graded, await _crashed(process, component, seconds)]
                graded.append(_graded(line))
            is_whole = True
        finally:
            # An answer that nobody read would be taken for that of the next request.
            if not is_whole:
                await self.end()
        return graded

    async def end(self) -> None:
        """Kills the process, if there is one."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()


async def _start() -> asyncio.subprocess.Process:
    """The process has no variable of the platform: neither the store's address nor a key."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        CHILD,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=LINE_BYTES,
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
        # An interrupt of the terminal is for the grader alone, which ends its processes when it is done.
        start_new_session=True,
    )


async def _send(
    process: asyncio.subprocess.Process, components: Sequence[Component], facts: AttemptFacts, seconds: float
) -> None:
    assert process.stdin is not None
    request = {
        "facts": asdict(facts),
        "components": [one.model_dump(mode="json") for one in components],
        "seconds": seconds,
    }
    process.stdin.write(json.dumps(request).encode() + b"\n")
    try:
        await process.stdin.drain()
    except ConnectionError:
        # It has died: the end of its output says so.
        return


async def _read(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    return await process.stdout.readline()


async def _crashed(process: asyncio.subprocess.Process, component: Component, seconds: float) -> Graded:
    """An output with which a grader computes too long earns the worst: otherwise an agent could escape its grader by a
    text. A task that takes too long, and a process that ends in another way, is not the agent's fault."""
    status = await process.wait()
    if status == -signal.SIGPROF:
        value = worst(component)
        cause = f"the grading of this output took longer than {seconds:g} s: it counts as {value:g}, the worst"
        return Graded(Grade(ComponentState.SCORED, value, None, cause), seconds)
    late = f"it took longer than {seconds:g} s"
    causes = {-signal.SIGVTALRM: f"{late} before it read the output", -signal.SIGALRM: late}
    cause = causes.get(status, f"its process ended ({status})")
    return Graded(Grade(ComponentState.FAILED, explanation=cause), seconds, crashed=True)


def _graded(line: bytes) -> Graded:
    answer = json.loads(line)
    found = answer["grade"]
    return Graded(Grade(**{**found, "state": ComponentState(found["state"])}), answer["seconds"])
