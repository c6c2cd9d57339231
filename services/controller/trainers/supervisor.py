"""Keeps a trainer for the active run: starts it again when it ends early, and gives up when it ends too often.

- Every end that was not planned is a row before the next start, so that a change of leaders forgives nothing.
- The same cause twice without a step is the run's own, and the run fails with it. A kill says little about the run.
- Each end without a step doubles the pause before the next start.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Protocol, TypeVar

from prometheus_client import Counter

from leyden.libs.store.database import StoreAway
from leyden.libs.store.runs.trainer_ends import TrainerEnd
from leyden.libs.telemetry import RateLimitedLogger, logger
from leyden.services.controller.settings import Settings
from leyden.services.controller.trainers.backend import (
    PASSING,
    BackendAway,
    TrainerAttempt,
    TrainerBackend,
    TrainerRefused,
    TrainerState,
    TrainerStatus,
)
from leyden.services.controller.trainers.models import TrainerModels

log = logger()
limited_log = RateLimitedLogger(log)

T = TypeVar("T")

STARTS = Counter("controller_trainer_starts_total", "Trainers started.")
ENDS = Counter("controller_trainer_ends_total", "Trainers that ended, planned ends apart.", ["state"])

POLL_SECONDS = 0.2
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0
FINISH_SECONDS = 900.0
"""How long a trainer may write the last step's checkpoint, prune and publish: after that step and, where lost files of
the version needed it again, after they did."""


class EndJournal(Protocol):
    """The ends of trainers that were not planned."""

    async def last_attempt(self, run_id: str) -> int:
        """The newest attempt whose end is recorded; 0 for none."""

    async def record(self, end: TrainerEnd) -> Sequence[TrainerEnd]:
        """Records an end, and returns those of the run after its last step, oldest first.

        A repeat changes nothing; idempotency key: run and attempt.
        """


def verdict(ends: Sequence[TrainerEnd], settings: Settings) -> str | None:
    """Why the run must fail after these ends without a step, oldest first; None where its trainer may start again."""
    if not ends:
        return None
    last = ends[-1]
    alike = [one for one in ends if one.state == last.state]
    match TrainerState(last.state):
        case TrainerState.FINAL:
            return f"the trainer ended: {last.reason}"
        case TrainerState.OUT_OF_MEMORY:
            is_over = len(alike) > 1
        case TrainerState.ENDED:
            same = [one for one in alike if _cause(one) == _cause(last)]
            is_over = len(alike) > settings.trainer_restarts or (len(same) > 1 and not PASSING.search(last.reason))
        case _:
            is_over = len(alike) > settings.trainer_kills
    return f"the trainer ended {len(ends)} times without a step: {last.reason}" if is_over else None


def _cause(end: TrainerEnd) -> str:
    """The reason without the numbers that differ from one attempt to the next."""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", end.reason)


class TrainerSupervisor:
    """One supervised trainer for each run that needs one."""

    def __init__(self, settings: Settings, backend: TrainerBackend, journal: EndJournal) -> None:
        self._settings = settings
        self._backend = backend
        self._journal = journal
        self._planned: dict[str, int] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stops: set[asyncio.Task[None]] = set()
        self._steps: dict[str, int] = {}
        self._until: dict[str, float] = {}
        """Runs that need their trainer no longer, and the end of `FINISH_SECONDS` since then."""
        self._finishing: frozenset[str] = frozenset()
        self._models: Mapping[str, TrainerModels] = {}
        self._waiting: dict[str, str] = {}
        self._failures: dict[str, str] = {}
        self._inherited: asyncio.Task[None] | None = None

    def reconcile(
        self,
        steps_done: dict[str, int],
        models: Mapping[str, TrainerModels] | None = None,
        finishing: Collection[str] = (),
    ) -> None:
        """Starts and stops trainers, so that exactly these runs have one.

        Args: steps_done: by run; ends before the last step count no more; models: by run, those that its trainer reads;
            finishing: runs with all of their steps, `supervised` or with the last one made within `FINISH_SECONDS`: a
            trainer that they have, also of an earlier leader, writes its checkpoint and ends by itself
        """
        self._models = models or {}
        self._steps = dict(steps_done)
        until = time.monotonic() + FINISH_SECONDS
        self._until = {run_id: self._until.get(run_id, until) for run_id in self._tasks if run_id not in steps_done}
        self._finishing = frozenset(finishing)
        for run_id in self._tasks.keys() - steps_done.keys() - self._finishing:
            # Once: a second time it would no longer wait for the end of its trainer.
            if not self._tasks[run_id].cancelling():
                self._tasks[run_id].cancel()
        self._tasks = {run_id: task for run_id, task in self._tasks.items() if not task.done()}
        for run_id in steps_done.keys() - self._tasks.keys() - self._failures.keys():
            self._tasks[run_id] = asyncio.create_task(self._supervise(run_id), name=f"trainer {run_id}")
        if self._inherited is None:
            self._inherited = asyncio.create_task(self._stop_inherited(), name="inherited trainers")

    @property
    def supervised(self) -> frozenset[str]:
        """Runs with a trainer that they need, or needed within `FINISH_SECONDS`."""
        now = time.monotonic()
        return frozenset(run_id for run_id in self._tasks if now < self._until.get(run_id, math.inf))

    def pop_failures(self) -> dict[str, str]:
        """Returns the runs given up since the last call, with the reason."""
        failures, self._failures = self._failures, {}
        return failures

    def waiting_reason(self, run_id: str) -> str | None:
        """Says, for users, why the run's trainer does not run yet; None where it runs."""
        return self._waiting.get(run_id)

    async def close(self) -> None:
        """Supervises no longer. The backend decides which trainers end with this process."""
        tasks = [*self._tasks.values(), *self._stops, *([] if self._inherited is None else [self._inherited])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._backend.close()

    async def _stop_inherited(self) -> None:
        """Stops the trainers of an earlier leader whose runs ended or were paused while nobody led."""
        live = await self._answered(self._backend.live_attempts)
        unneeded = [attempt for attempt in live if attempt.run_id not in self._steps]
        log.info("trainers of an earlier leader", live=len(live), unneeded=[one.name for one in unneeded])
        # At once: one that takes long to end keeps no other one's GPUs.
        await asyncio.gather(*map(self._stop_finished, unneeded))

    async def _stop_finished(self, attempt: TrainerAttempt) -> None:
        """Stops a trainer that no run needs, once its last step's checkpoint has had its time."""
        while attempt.run_id in self._finishing:
            if (await self._status(attempt)).state.is_over:
                return
            await asyncio.sleep(POLL_SECONDS)
        # A version that was lost meanwhile needs it again.
        if attempt.run_id not in self._steps:
            await self._stop(attempt)

    async def _stop(self, attempt: TrainerAttempt) -> None:
        """Stops a trainer that no run needs."""
        await self._answered(lambda: self._backend.stop(attempt))

    async def _stop_shielded(self, attempt: TrainerAttempt) -> None:
        """Stops a trainer, also where a tick cancels the caller meanwhile."""
        task = asyncio.create_task(self._stop(attempt), name=f"stop of {attempt.name}")
        self._stops.add(task)
        task.add_done_callback(self._stops.discard)
        await asyncio.shield(task)

    async def _supervise(self, run_id: str) -> None:
        done, steps = 0, self._steps.get(run_id)
        while run_id in self._steps:
            attempt = await self._next_attempt(run_id)
            try:
                status = await self._run(attempt)
            except TrainerRefused as error:
                self._failures[run_id] = f"the trainer could not be started: {error}"
                # An adopted one may be at work.
                await self._stop_shielded(attempt)
                return
            if status.state is TrainerState.DONE:
                # The next tick sees that the run needs no trainer. Steps in between forgive ends, as those of a drain.
                self._planned[run_id] = attempt.number
                done = done + 1 if self._steps.get(run_id) == steps else 1
                steps = self._steps.get(run_id)
                reason, pause = self._left(done), FIRST_PAUSE_SECONDS
            else:
                ends = await self._record(attempt, status)
                reason, pause = verdict(ends, self._settings), FIRST_PAUSE_SECONDS * 2.0 ** max(0, len(ends) - 1)
            if reason is not None and run_id in self._steps:
                self._failures[run_id] = reason
                return
            await asyncio.sleep(min(LONGEST_PAUSE_SECONDS, pause))

    def _left(self, times: int) -> str | None:
        return f"the trainer left its run {times} times" if times > self._settings.trainer_restarts else None

    async def _record(self, attempt: TrainerAttempt, status: TrainerStatus) -> Sequence[TrainerEnd]:
        ENDS.labels(status.state).inc()
        log.warning("trainer ended", trainer=attempt.name, state=status.state, reason=status.reason)
        end = TrainerEnd(attempt.run_id, attempt.number, status.state, status.reason, status.output)
        return await self._answered(lambda: self._journal.record(end))

    async def _next_attempt(self, run_id: str) -> TrainerAttempt:
        """Returns the attempt whose end nobody has seen, as after a change of leaders, or a new one."""
        recorded = await self._answered(lambda: self._journal.last_attempt(run_id))
        recorded = max(recorded, self._planned.get(run_id, 0))
        last = await self._answered(lambda: self._backend.last_attempt(run_id), run_id)
        return TrainerAttempt(run_id, last if last > recorded else recorded + 1)

    async def _run(self, attempt: TrainerAttempt) -> TrainerStatus:
        """Runs one attempt to its end. Cancelling stops the trainer, unless the run still needs it."""
        try:
            models = self._models.get(attempt.run_id, TrainerModels())
            await self._answered(lambda: self._backend.start(attempt, models), attempt.run_id)
            STARTS.inc()
            while not (status := await self._status(attempt)).state.is_over:
                if status.state is TrainerState.WAITING:
                    self._waiting[attempt.run_id] = status.reason
                await asyncio.sleep(POLL_SECONDS)
            return status
        except asyncio.CancelledError:
            # `close` cancels as well, and leaves the trainers to the backend.
            if attempt.run_id not in self._steps and attempt.run_id not in self._finishing:
                self._planned[attempt.run_id] = attempt.number
                await self._stop_shielded(attempt)
            raise
        finally:
            self._waiting.pop(attempt.run_id, None)

    async def _status(self, attempt: TrainerAttempt) -> TrainerStatus:
        return await self._answered(lambda: self._backend.status(attempt), attempt.run_id)

    async def _answered(self, ask: Callable[[], Awaitable[T]], run_id: str | None = None) -> T:
        """Asks journal or backend until it answers. The run, where one is named, says meanwhile why it waits."""
        try:
            while True:
                try:
                    return await ask()
                except (StoreAway, BackendAway) as error:
                    limited_log.warning("no answer about trainers", cause=str(error))
                    if run_id is not None:
                        self._waiting[run_id] = f"its state is not known: {error}"
                    await asyncio.sleep(FIRST_PAUSE_SECONDS)
        finally:
            if run_id is not None:
                self._waiting.pop(run_id, None)
