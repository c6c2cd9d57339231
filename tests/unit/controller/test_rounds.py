import asyncio

import pytest
from structlog.testing import capture_logs

from leyden.libs.store.database import StoreAway
from leyden.services.controller.upkeep.rounds import repeat


async def test_a_failed_round_stops_no_later_one():
    failures = [StoreAway("no route"), ValueError("a defect")]
    third = asyncio.Event()

    async def work() -> None:
        if failures:
            raise failures.pop(0)
        third.set()

    with capture_logs() as lines:
        loop = asyncio.create_task(repeat(work, 0.0, "work not done"))
        await asyncio.wait_for(third.wait(), 10)
        loop.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loop
    assert [(line["event"], line["log_level"]) for line in lines] == [
        ("work not done", "warning"),
        ("work not done", "error"),
    ]
