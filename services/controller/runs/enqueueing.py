"""Fills the task queue: rollouts that wait for an attempt go to Redis, where runners find them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from prometheus_client import Gauge

from leyden.libs.faults import fault_point
from leyden.libs.queue.connection import QueueUnavailable
from leyden.libs.queue.external import EXTERNAL
from leyden.libs.queue.stream import RolloutQueue
from leyden.libs.store.runs.rollouts import QueuedRollout
from leyden.libs.telemetry import RateLimitedLogger, logger
from leyden.services.controller.settings import Settings

limited_log = RateLimitedLogger(logger())

ROLLOUTS_QUEUED = Gauge("controller_rollouts_queued", "Rollouts that wait for an attempt of a runner.")


class WaitingLine:
    """The rollouts that wait, and those of them that this process has enqueued lately."""

    def __init__(self, settings: Settings, queue: RolloutQueue) -> None:
        self._settings, self._queue = settings, queue
        self._enqueued_at = 0.0
        self._enqueued: set[str] = set()

    async def enqueue(self, queued: Sequence[QueuedRollout], admitted: Sequence[QueuedRollout]) -> None:
        """Enqueues waiting rollouts: new ones at once, all of them every few seconds, since Redis may be wiped."""
        due = [one for one in queued if one.is_due] + list(admitted)
        ROLLOUTS_QUEUED.set(sum(one.runner_type != EXTERNAL for one in (*queued, *admitted)))
        if time.monotonic() - self._enqueued_at > self._settings.enqueue_again_seconds:
            self._enqueued.clear()
            self._enqueued_at = time.monotonic()
        # Clients of external agents ask the store: nobody would read their stream.
        fresh = [one for one in due if one.rollout_id not in self._enqueued and one.runner_type != EXTERNAL]
        try:
            for runner_type in dict.fromkeys(one.runner_type for one in fresh):
                ids = [one.rollout_id for one in fresh if one.runner_type == runner_type]
                await self._queue.enqueue(ids, runner_type)
            if fresh:
                fault_point("controller.enqueued")
        except QueueUnavailable as error:
            limited_log.warning("rollouts not enqueued", cause=str(error))
            return
        # A rollout that is retried within this time waits until all are enqueued again.
        self._enqueued.update(one.rollout_id for one in fresh)
