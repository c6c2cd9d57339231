import asyncio
import gzip
from collections.abc import AsyncIterator

import pytest

from leyden.libs.service import Budget, Overloaded, Problem, ShareUsed
from leyden.libs.service.body import read_body


async def pieces(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


async def read(chunks: AsyncIterator[bytes], encoding: str = "", budget: Budget | None = None) -> bytes:
    with (budget or Budget(10_000)).share() as share:
        return await read_body(chunks, encoding, share, max_bytes=1000, seconds=0.2)


async def test_gzip_is_decompressed_across_pieces() -> None:
    packed = gzip.compress(b"spans" * 100)
    assert await read(pieces(*(packed[i : i + 3] for i in range(0, len(packed), 3))), "gzip") == b"spans" * 100


async def test_a_bomb_costs_the_bound_and_not_its_size() -> None:
    budget = Budget(1500)
    with pytest.raises(Problem) as caught:
        await read(pieces(gzip.compress(b"\0" * 50_000_000)), "gzip", budget)
    assert caught.value.status_code == 413
    assert await read(pieces(b"x" * 1000), budget=budget) == b"x" * 1000


def test_a_client_has_its_part_of_the_budget_and_no_more() -> None:
    budget = Budget(1000, client_bytes=400)
    with budget.share("a") as first, budget.share("a") as second, budget.share("b") as other:
        first.acquire(300)
        with pytest.raises(ShareUsed):
            second.acquire(101)
        second.acquire(100)
        other.acquire(400)
        with budget.share() as nobodys, pytest.raises(Overloaded):
            nobodys.acquire(201)
    with budget.share("a") as again:
        again.acquire(400)


async def test_requests_share_the_budget_and_release_it() -> None:
    budget = Budget(1000)
    with budget.share() as held:
        held.acquire(600)
        with pytest.raises(Overloaded):
            await read(pieces(b"x" * 300, b"x" * 300), budget=budget)
        assert await read(pieces(b"x" * 400), budget=budget) == b"x" * 400
    assert await read(pieces(b"x" * 1000), budget=budget) == b"x" * 1000


async def test_a_client_that_stops_sending_gets_408() -> None:
    async def stalled() -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.Event().wait()

    with pytest.raises(Problem) as caught:
        await read(stalled())
    assert caught.value.status_code == 408
