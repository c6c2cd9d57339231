"""Turns of requests for embeddings: one attempt's slow clients leave room for others."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from leyden.libs.store.attempts import AttemptKey
from leyden.services.gateway.embeddings.service import MAX_ATTEMPT_REQUESTS, MAX_REQUESTS, Embeddings
from leyden.services.gateway.errors import TooManyCalls, Unavailable

NOTHING = cast(Any, None)


async def test_an_attempt_has_few_turns_at_once_and_others_have_theirs() -> None:
    service = Embeddings(NOTHING, NOTHING, None, NOTHING, hold_seconds=0.05)
    ended, begun = asyncio.Event(), list[str]()

    async def ask(name: str) -> None:
        async with service.turn(AttemptKey(name, 1)):
            begun.append(name)
            await ended.wait()

    asked = [asyncio.create_task(ask("slow")) for _ in range(2 * MAX_REQUESTS)]
    asked.append(asyncio.create_task(ask("other")))
    done, _ = await asyncio.wait(asked, timeout=1)
    assert sorted(begun) == ["other"] + ["slow"] * MAX_ATTEMPT_REQUESTS
    assert {type(one.exception()) for one in done} == {TooManyCalls}
    ended.set()
    await asyncio.gather(*asked, return_exceptions=True)
    async with service.turn(AttemptKey("slow", 1)):
        pass


async def test_no_turn_for_too_long_is_the_platforms_failure() -> None:
    service = Embeddings(NOTHING, NOTHING, None, NOTHING, hold_seconds=0.05)
    async with asyncio.TaskGroup() as group:
        ended = asyncio.Event()

        async def hold(number: int) -> None:
            async with service.turn(AttemptKey(str(number), 1)):
                await ended.wait()

        for number in range(MAX_REQUESTS):
            group.create_task(hold(number))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable):
            async with service.turn(AttemptKey("late", 1)):
                pass
        ended.set()
