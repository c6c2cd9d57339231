"""One transaction for the rows of several requests, by the group commit of the store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from prometheus_client import Counter, Histogram

from leyden.libs.faults import fault_point
from leyden.libs.store.database import Database, Refused, StoreAway
from leyden.libs.store.group_commit import GroupCommit
from leyden.libs.store.records.spans import NewReward, NewSpan, write_telemetry
from leyden.libs.telemetry import SECONDS_BUCKETS, logger

log = logger()

SPANS = Counter("collector_spans_total", "Spans made durable, repeats included.")
REWARDS = Counter("collector_rewards_total", "Rewards made durable, repeats included.")
COMMIT_SECONDS = Histogram("collector_commit_seconds", "Duration of one transaction.", buckets=SECONDS_BUCKETS)

TelemetryCommit = GroupCommit[NewSpan | NewReward]


def telemetry_commit(database: Database, *, max_batch_rows: int, write_seconds: float) -> TelemetryCommit:
    """The collector's group commit. It holds nothing for a store that is away: exporters send again.

    Args: write_seconds: bound on one transaction
    """

    async def write(rows: Sequence[NewSpan | NewReward], _may_exist: bool) -> None:
        spans = [row for row in rows if isinstance(row, NewSpan)]
        rewards = [row for row in rows if isinstance(row, NewReward)]
        try:
            with COMMIT_SECONDS.time():
                async with asyncio.timeout(write_seconds):
                    await write_telemetry(database, spans, rewards)
        except TimeoutError as error:
            raise StoreAway(f"no commit within {write_seconds:g} s") from error
        except (StoreAway, Refused):
            raise
        # Exporters send again what nobody refused for good.
        except Exception as error:
            log.exception("batch not written")
            raise StoreAway(str(error)) from error
        fault_point("collector.committed")
        SPANS.inc(len(spans))
        REWARDS.inc(len(rewards))

    return GroupCommit(write, max_items=max_batch_rows, hold_seconds=0)
