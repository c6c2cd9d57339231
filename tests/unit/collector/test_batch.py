"""The writer outlives whatever a batch does to it, and tells each request its own end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from leyden.libs.store.calls import StoreAway
from leyden.libs.store.spans import DOOR, NewReward, TelemetryRefused
from leyden.services.collector import batch
from leyden.services.collector.batch import BatchWriter
from leyden.services.collector.decode import Rows

TROUBLE = {"refused": TelemetryRefused("no such run"), "odd": RuntimeError("nobody knows why")}


async def write(_database: Any, _spans: Sequence[Any], rewards: Sequence[NewReward]) -> None:
    """Stands for the store: refuses what holds a refused row, and breaks at an odd one that comes alone."""
    if any(reward.key == "refused" for reward in rewards):
        raise TROUBLE["refused"]
    if [reward.key for reward in rewards] == ["odd"]:
        raise TROUBLE["odd"]


def reward(key: str) -> Rows:
    return Rows(rewards=[NewReward("run-a.1.0", 1, key, "run-a", DOOR, "reward", 1.0, None, None)])


async def test_a_request_that_breaks_after_another_was_refused_leaves_a_writer_that_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch, "write_telemetry", write)
    writer: Any = BatchWriter(None, max_batch_rows=100, write_seconds=60)  # type: ignore[arg-type]
    together = [asyncio.ensure_future(writer.store(reward(key))) for key in ("refused", "odd", "good")]
    await asyncio.sleep(0)
    writing = asyncio.create_task(writer.run())
    async with asyncio.timeout(60):
        ends = await asyncio.gather(*together, return_exceptions=True)
        await writer.store(reward("later"))
    assert not writing.done()
    writing.cancel()
    await asyncio.wait({writing})
    assert [type(end) for end in ends] == [TelemetryRefused, StoreAway, type(None)]
