"""Group commit: requests that arrive while a transaction runs share the next one; each is answered after its commit."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import Counter, Histogram

from leyden.libs.faults import fault_point
from leyden.libs.store.calls import StoreAway
from leyden.libs.store.database import Database
from leyden.libs.store.spans import TelemetryRefused, write_telemetry
from leyden.libs.telemetry import SECONDS_BUCKETS, logger
from leyden.services.collector.decode import Rows

log = logger()

SPANS = Counter("collector_spans_total", "Spans made durable, repeats included.")
REWARDS = Counter("collector_rewards_total", "Rewards made durable, repeats included.")
COMMIT_SECONDS = Histogram("collector_commit_seconds", "Duration of one transaction.", buckets=SECONDS_BUCKETS)


@dataclass(frozen=True, slots=True)
class _Waiting:
    rows: Rows
    durable: asyncio.Future[None]


class BatchWriter:
    """Writes what `store` is given, one transaction at a time.

    Rows that Postgres refuses fail only the request they came with: the batch is then written request by request.
    """

    def __init__(self, database: Database, *, max_batch_rows: int, write_seconds: float) -> None:
        self._database = database
        self._max_batch_rows = max_batch_rows
        self._write_seconds = write_seconds
        self._waiting: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()

    async def store(self, rows: Rows) -> None:
        """Returns when the rows are durable.

        Raises: StoreAway: nothing is known to be stored, a repeat is harmless; TelemetryRefused: nothing was stored
        """
        if not len(rows):
            return
        durable: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(rows, durable))
        self._arrived.set()
        await durable

    async def run(self) -> None:
        """Writes until cancelled."""
        while True:
            await self._arrived.wait()
            await self._conclude(self._next_batch())

    def _next_batch(self) -> list[_Waiting]:
        batch = [self._waiting.popleft()]
        size = len(batch[0].rows)
        while self._waiting and size + len(self._waiting[0].rows) <= self._max_batch_rows:
            batch.append(self._waiting.popleft())
            size += len(batch[-1].rows)
        if not self._waiting:
            self._arrived.clear()
        return batch

    async def _conclude(self, batch: Sequence[_Waiting]) -> None:
        """Writes the batch and tells each of its requests how that ended."""
        try:
            await self._write(batch)
        except TelemetryRefused as error:
            if len(batch) == 1:
                _settle(batch, error)
                return
            for waiting in batch:
                await self._conclude([waiting])
        except StoreAway as error:
            _settle(batch, error)
        # The writer must live; what it could not write is sent again by the exporters.
        except Exception as error:
            log.exception("batch not written")
            _settle(batch, StoreAway(str(error)))
        else:
            _settle(batch, None)

    async def _write(self, batch: Sequence[_Waiting]) -> None:
        spans = [span for waiting in batch for span in waiting.rows.spans]
        rewards = [reward for waiting in batch for reward in waiting.rows.rewards]
        with COMMIT_SECONDS.time():
            try:
                async with asyncio.timeout(self._write_seconds):
                    await write_telemetry(self._database, spans, rewards)
            except TimeoutError as error:
                raise StoreAway(f"no commit within {self._write_seconds:g} s") from error
        fault_point("collector.committed")
        SPANS.inc(len(spans))
        REWARDS.inc(len(rewards))


def _settle(batch: Sequence[_Waiting], error: Exception | None) -> None:
    for waiting in batch:
        # A client that hung up no longer waits; its rows are durable all the same.
        if waiting.durable.done():
            continue
        if error is None:
            waiting.durable.set_result(None)
        else:
            waiting.durable.set_exception(error)
