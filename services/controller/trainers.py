"""Keeps a trainer for the active run: starts it again when it ends early, and gives up when it ends too often."""

from __future__ import annotations

import asyncio

from prometheus_client import Counter

from leyden.libs.telemetry import logger
from leyden.services.controller.settings import Settings
from leyden.services.controller.trainer_backend import (
    TrainerAttempt,
    TrainerBackend,
    TrainerRefused,
    TrainerState,
    TrainerStatus,
)

log = logger()

STARTS = Counter("controller_trainer_starts_total", "Trainers started.")

POLL_SECONDS = 0.2
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0


class TrainerSupervisor:
    """One supervised trainer for each run that needs one."""

    def __init__(self, settings: Settings, backend: TrainerBackend) -> None:
        self._settings = settings
        self._backend = backend
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._steps: dict[str, int] = {}
        self._waiting: dict[str, str] = {}
        self._failures: dict[str, str] = {}

    def reconcile(self, steps_done: dict[str, int]) -> None:
        """Starts and stops trainers, so that exactly these runs have one.

        Args: steps_done: by run; a step since the last crash sets the count of crashes back to zero
        """
        self._steps = dict(steps_done)
        for run_id in self._tasks.keys() - steps_done.keys():
            self._tasks[run_id].cancel()
        self._tasks = {run_id: task for run_id, task in self._tasks.items() if not task.done()}
        for run_id in steps_done.keys() - self._tasks.keys() - self._failures.keys():
            self._tasks[run_id] = asyncio.create_task(self._supervise(run_id), name=f"trainer {run_id}")

    def pop_failures(self) -> dict[str, str]:
        """Returns the runs given up since the last call, with the reason."""
        failures, self._failures = self._failures, {}
        return failures

    def waiting_reason(self, run_id: str) -> str | None:
        """Says, for users, why the run's trainer does not run yet; None where it runs."""
        return self._waiting.get(run_id)

    async def close(self) -> None:
        """Supervises no longer. The backend decides which trainers end with this process."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._backend.close()

    async def _supervise(self, run_id: str) -> None:
        ends, kills, steps = 0, 0, self._steps.get(run_id, 0)
        while True:
            try:
                status = await self._run(await self._next_attempt(run_id))
            except TrainerRefused as error:
                self._failures[run_id] = f"the trainer could not be started: {error}"
                return
            if self._steps.get(run_id, 0) > steps:
                ends, kills, steps = 0, 0, self._steps[run_id]
            # A kill says little about the run, so more of them are allowed.
            ends, kills = ends + (status.state is TrainerState.ENDED), kills + (status.state is TrainerState.KILLED)
            log.warning("trainer ended", run_id=run_id, reason=status.reason, ends=ends, kills=kills)
            if ends > self._settings.trainer_restarts or kills > self._settings.trainer_kills:
                self._failures[run_id] = f"the trainer ended {ends + kills} times without a step: {status.reason}"
                return
            await asyncio.sleep(min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** max(0, ends - 1)))

    async def _next_attempt(self, run_id: str) -> TrainerAttempt:
        """Returns the attempt that runs already, as after a change of leaders, or a new one."""
        last = TrainerAttempt(run_id, await self._backend.last_attempt(run_id))
        if last.number and not (await self._backend.status(last)).state.is_over:
            return last
        return TrainerAttempt(run_id, last.number + 1)

    async def _run(self, attempt: TrainerAttempt) -> TrainerStatus:
        """Runs one attempt to its end. Cancelling stops the trainer, unless the run still needs it."""
        try:
            await self._backend.start(attempt)
            STARTS.inc()
            while not (status := await self._backend.status(attempt)).state.is_over:
                self._waiting.pop(attempt.run_id, None)
                if status.state is TrainerState.WAITING:
                    self._waiting[attempt.run_id] = status.reason
                await asyncio.sleep(POLL_SECONDS)
            return status
        except asyncio.CancelledError:
            # `close` cancels as well, and leaves the trainers to the backend.
            if attempt.run_id not in self._steps:
                await asyncio.shield(asyncio.ensure_future(self._backend.stop(attempt)))
            raise
        finally:
            self._waiting.pop(attempt.run_id, None)
