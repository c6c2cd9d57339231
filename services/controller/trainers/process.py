"""Trainers as processes of the controller's machine; they die with the controller."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from pathlib import Path

from leyden.libs.embedded.launch import tied
from leyden.libs.embedded.memory_kills import machine_memory_kills, memory_kills
from leyden.libs.telemetry import logger
from leyden.services.controller.settings import Settings
from leyden.services.controller.trainers.backend import (
    TrainerAttempt,
    TrainerRefused,
    TrainerState,
    TrainerStatus,
    end_of,
)
from leyden.services.controller.trainers.models import TrainerModels

log = logger()

OUTPUT_BYTES = 8000
RECENT_SECONDS = 10.0
"""The kernel's count is compared with one that is older than this: a process may take seconds to die."""


class ProcessTrainers:
    """A `TrainerBackend`: one process per attempt, in a session of its own."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._processes: dict[TrainerAttempt, asyncio.subprocess.Process] = {}
        self._memory_kills: dict[TrainerAttempt, deque[tuple[float, int | None]]] = {}

    async def last_attempt(self, run_id: str) -> int:
        # Processes of a former leader have died with it.
        return max((attempt.number for attempt in self._processes if attempt.run_id == run_id), default=0)

    async def live_attempts(self) -> list[TrainerAttempt]:
        return [attempt for attempt, process in self._processes.items() if process.returncode is None]

    async def start(self, attempt: TrainerAttempt, models: TrainerModels) -> None:
        # The API has seen the models of this machine.
        if attempt in self._processes:
            return
        self._memory_kills[attempt] = deque([(time.monotonic(), _kills())], maxlen=2)
        try:
            process = await self._spawn(attempt.run_id)
        except OSError as error:
            raise TrainerRefused(str(error)) from error
        self._processes[attempt] = process
        log.info("trainer started", trainer=attempt.name, pid=process.pid)

    async def status(self, attempt: TrainerAttempt) -> TrainerStatus:
        process = self._processes[attempt]
        code = process.returncode
        if code is None:
            self._count_memory_kills(attempt)
            return TrainerStatus(TrainerState.RUNNING, f"process {process.pid}")
        output = await asyncio.to_thread(_last_lines, self._log_file(attempt.run_id))
        # The trainer has the cgroup of this process, as agents and engines of a laptop do.
        (_, before), *_ = self._memory_kills[attempt]
        after = _kills()
        kills = None if before is None or after is None else after - before
        return end_of(code, output, "give this machine more memory", memory_kills=kills)

    async def stop(self, attempt: TrainerAttempt) -> None:
        process = self._processes.get(attempt)
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._settings.trainer_stop_seconds):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    async def close(self) -> None:
        await asyncio.gather(*map(self.stop, self._processes))

    async def _spawn(self, run_id: str) -> asyncio.subprocess.Process:
        self._settings.log_folder.mkdir(parents=True, exist_ok=True)
        with self._log_file(run_id).open("ab") as output:
            return await asyncio.create_subprocess_exec(
                *tied(*self._settings.trainer_command, "--run-id", run_id),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _count_memory_kills(self, attempt: TrainerAttempt) -> None:
        counts = self._memory_kills[attempt]
        if time.monotonic() - counts[-1][0] > RECENT_SECONDS:
            counts.append((time.monotonic(), _kills()))

    def _log_file(self, run_id: str) -> Path:
        return log_file(self._settings.log_folder, run_id)


def _kills() -> int | None:
    """The kernel's kills for want of memory around the trainer: of a machine without counting cgroups, all of them."""
    own = memory_kills()
    return machine_memory_kills() if own is None else own


def log_file(folder: Path, run_id: str) -> Path:
    """The file of the output of a run's trainers."""
    return folder / f"trainer-{run_id}.log"


def _last_lines(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - OUTPUT_BYTES))
        return file.read().decode(errors="replace")
