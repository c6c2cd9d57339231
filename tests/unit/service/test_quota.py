"""A quota near its limit: what an attempt has really stored is read, by one of its requests at a time."""

from __future__ import annotations

import asyncio

from leyden.libs.service.quota import Amount, Limit, Quota

LIMIT = Limit(Amount(3, 300), "rewards", ("MAX_REWARDS", "100 a reward"))


async def test_requests_at_the_limit_share_the_reading_of_what_their_attempt_has_stored() -> None:
    reads: list[str] = []
    may_answer = asyncio.Event()

    async def stored(attempt: str) -> Amount:
        reads.append(attempt)
        await may_answer.wait()
        return Amount(3, 300)

    quota = Quota(LIMIT, stored)
    for attempt in ("first", "second"):
        with quota.storing(attempt, [100] * 3):
            pass
    flood = [asyncio.create_task(quota.room("first", [100])) for _ in range(20)]
    other = asyncio.create_task(quota.room("second", [100]))
    while "second" not in reads:
        await asyncio.sleep(0)
    assert reads == ["first", "second"]
    may_answer.set()
    assert await asyncio.gather(*flood, other) == [0] * 21
    assert reads == ["first", "second"]


async def test_repeats_that_counted_twice_leave_room_once_the_store_is_read() -> None:
    async def stored(_attempt: str) -> Amount:
        return Amount(1, 100)

    quota = Quota(LIMIT, stored)
    with quota.storing("first", [100] * 3):
        pass
    assert await asyncio.gather(*(quota.room("first", [100] * 2) for _ in range(3))) == [2, 2, 2]
