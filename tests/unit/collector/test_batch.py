"""The collector's transactions: a request that breaks one ends alone, and later requests are written."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from leyden.libs.store import group_commit
from leyden.libs.store.database import Refused, StoreAway
from leyden.libs.store.records.spans import ENDPOINT, NewReward
from leyden.services.collector import batch

TROUBLE = {"refused": Refused("no such run"), "odd": RuntimeError("nobody knows why")}


async def write(_database: Any, _spans: Sequence[Any], rewards: Sequence[NewReward]) -> None:
    """Stands for the store: refuses batches with a refused row, and breaks at an odd one that comes alone."""
    if any(reward.key == "refused" for reward in rewards):
        raise TROUBLE["refused"]
    if [reward.key for reward in rewards] == ["odd"]:
        raise TROUBLE["odd"]


def reward(key: str) -> list[NewReward]:
    return [NewReward("run-a.1.0", 1, key, "run-a", ENDPOINT, "reward", 1.0, None, None)]


async def test_the_writer_survives_a_request_that_fails_after_another_was_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch, "write_telemetry", write)
    monkeypatch.setattr(group_commit, "RETRY_SECONDS", 0.01)
    commit: Any = batch.telemetry_commit(None, max_batch_rows=100, write_seconds=60)  # type: ignore[arg-type]
    together = [asyncio.ensure_future(commit.submit(reward(key))) for key in ("refused", "odd", "good")]
    await asyncio.sleep(0)
    writing = asyncio.create_task(commit.run())
    async with asyncio.timeout(60):
        ends = await asyncio.gather(*together, return_exceptions=True)
        await commit.submit(reward("later"))
    assert not writing.done()
    writing.cancel()
    await asyncio.wait({writing})
    assert [type(end) for end in ends] == [Refused, StoreAway, type(None)]
