"""Starts, watches and stops trainer processes. A trainer itself makes sure that it is the only one of its run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

from prometheus_client import Counter

from leyden.libs.telemetry import logger
from leyden.services.controller import launch
from leyden.services.controller.settings import Settings

log = logger()

STARTS = Counter("controller_trainer_starts_total", "Trainer processes started.")

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0
LAST_WORDS_BYTES = 4000

_LAUNCH = str(Path(launch.__file__).resolve())


class Trainers:
    """One supervised process per run that wants one."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._watched: dict[str, asyncio.Task[None]] = {}
        self._steps: dict[str, int] = {}
        self._failed: dict[str, str] = {}

    def want(self, steps_done: dict[str, int]) -> None:
        """Says which runs need a trainer, and how far each is: a step made since the last crash forgives it."""
        self._steps = dict(steps_done)
        for run_id in self._watched.keys() - steps_done.keys():
            self._watched[run_id].cancel()
        self._watched = {run_id: task for run_id, task in self._watched.items() if not task.done()}
        for run_id in steps_done.keys() - self._watched.keys() - self._failed.keys():
            self._watched[run_id] = asyncio.create_task(self._supervise(run_id), name=f"trainer {run_id}")

    def take_failures(self) -> dict[str, str]:
        """Runs whose trainer was given up since the last call, and its last words."""
        failed, self._failed = self._failed, {}
        return failed

    async def stop(self) -> None:
        """Stops every trainer and waits for its end."""
        tasks = list(self._watched.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _supervise(self, run_id: str) -> None:
        failures, kills, steps = 0, 0, self._steps.get(run_id, 0)
        while True:
            try:
                code = await self._run_once(run_id)
            except OSError as error:
                self._failed[run_id] = f"the trainer could not be started: {error}"
                return
            if self._steps.get(run_id, 0) > steps:
                failures, kills, steps = 0, 0, self._steps[run_id]
            # A signal came from outside: it says little about the run, and much patience costs little.
            failures, kills = failures + (code >= 0), kills + (code < 0)
            log.warning("trainer ended", run_id=run_id, exit_code=code, failures=failures, kills=kills)
            if failures > self._settings.trainer_restarts or kills > self._settings.trainer_kills:
                words = await asyncio.to_thread(last_words, self._log_file(run_id))
                times = failures + kills
                self._failed[run_id] = f"the trainer ended with code {code} {times} times without a step: {words}"
                return
            await asyncio.sleep(min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** max(0, failures - 1)))

    async def _run_once(self, run_id: str) -> int:
        """Runs the trainer to its end. Cancelling stops it: SIGTERM, a while, SIGKILL of its session."""
        process = await self._start(run_id)
        STARTS.inc()
        log.info("trainer started", run_id=run_id, pid=process.pid)
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                await asyncio.shield(asyncio.ensure_future(self._end(process)))

    async def _start(self, run_id: str) -> asyncio.subprocess.Process:
        self._settings.log_folder.mkdir(parents=True, exist_ok=True)
        with self._log_file(run_id).open("ab") as output:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", _LAUNCH, str(os.getpid())),
                *(*self._settings.trainer_command, "--run-id", run_id),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._settings.trainer_stop_seconds):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    def _log_file(self, run_id: str) -> Path:
        return self._settings.log_folder / f"trainer-{run_id}.log"


def last_words(path: Path) -> str:
    """The last line that a process wrote, bounded; empty when it wrote none."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LAST_WORDS_BYTES))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:1000] if lines else ""
