"""The pool: a rollout keeps its engine, waits while none serves its run, and leaves an engine that failed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from prometheus_client import REGISTRY

from leyden.libs.store.database import StoreAway
from leyden.services.gateway.engine.pool import Endpoint, EnginePool, HoldTimeout
from leyden.services.gateway.errors import Unavailable
from tests.support.waiting import eventually

A, B, C = (Endpoint(f"http://{name}", "run-a", 3) for name in "abc")


class Table:
    """The controller's table; `endpoints` may change at any time, and None makes the store unreachable."""

    def __init__(self, *endpoints: Endpoint) -> None:
        self.endpoints: Sequence[Endpoint] | None = endpoints
        self.reads = 0

    async def read(self) -> Sequence[Endpoint]:
        self.reads += 1
        if self.endpoints is None:
            raise StoreAway("nobody answers")
        return self.endpoints


async def pool_of(*endpoints: Endpoint, static_urls: Sequence[str] = ()) -> tuple[EnginePool, Table]:
    table = Table(*endpoints)
    pool = EnginePool(table.read, static_urls=static_urls, poll_seconds=0.01)
    await pool.refresh()
    return pool, table


def test_an_endpoint_names_its_weights_as_the_engine_does() -> None:
    assert A.weight_version == "run-a:3"
    assert Endpoint("http://a").weight_version is None


async def picks(pool: EnginePool, rollouts: int = 30, run_id: str = "run-a") -> list[str]:
    hold = HoldTimeout(60)
    return [(await pool.pick(run_id, f"{run_id}.0.{number}", hold)).url for number in range(rollouts)]


async def test_rollouts_spread_over_engines_and_stay_there_when_another_engine_is_added_or_removed() -> None:
    pool, table = await pool_of(A, B)
    before = await picks(pool)
    assert set(before) == {A.url, B.url}
    table.endpoints = (A, B, C)
    await pool.refresh()
    after = await picks(pool)
    assert C.url in after
    assert all(now in {then, C.url} for then, now in zip(before, after, strict=True))
    table.endpoints = (A, B)
    await pool.refresh()
    assert await picks(pool) == before


async def test_a_rollout_waits_for_an_engine_of_its_run() -> None:
    pool, table = await pool_of(Endpoint("http://other", "run-b", 0))
    refreshing = asyncio.create_task(pool.run())
    picking = asyncio.create_task(pool.pick("run-a", "run-a.0.0", HoldTimeout(60)))
    await asyncio.sleep(0.05)
    assert not picking.done() and REGISTRY.get_sample_value("gateway_held_calls") == 1
    table.endpoints = (A,)
    assert await picking == A
    assert REGISTRY.get_sample_value("gateway_held_calls") == 0
    refreshing.cancel()


async def test_a_run_gets_engines_of_its_pool_alone() -> None:
    pool, _ = await pool_of(static_urls=["http://default"])
    with pytest.raises(Unavailable):
        await pool.pick("run-a", "run-a.0.0", HoldTimeout(0.05), "small")
    pool, _ = await pool_of(A, Endpoint("http://small", "run-a", 3, "small"))
    for number in range(10):
        assert (await pool.pick("run-a", f"run-a.0.{number}", HoldTimeout(60), "small")).url == "http://small"


async def test_a_rollout_waits_no_longer_than_its_hold_timeout() -> None:
    pool, _ = await pool_of()
    with pytest.raises(Unavailable, match=r"No engine served this run for 0\.05 seconds") as refused:
        await pool.pick("run-a", "run-a.0.0", HoldTimeout(0.05))
    assert (refused.value.code, refused.value.retry_after_seconds) == ("engine_unavailable", 10)


async def test_tokens_renew_a_hold_timeout() -> None:
    hold = HoldTimeout(60.0)
    await asyncio.sleep(0.5)
    late = hold.remaining()
    hold.renew()
    assert late <= 59.5 < hold.remaining()


async def test_an_engine_that_failed_is_avoided_while_another_serves_the_run() -> None:
    pool, table = await pool_of(A, B)
    pool.mark_unhealthy(A.url, "run-a")
    assert set(await picks(pool)) == {B.url}
    table.endpoints = (A,)
    await pool.refresh()
    assert set(await picks(pool)) == {A.url}


async def test_an_engine_that_serves_another_run_is_avoided_by_the_run_that_it_failed_alone() -> None:
    pool, _ = await pool_of(static_urls=["http://one", "http://other"])
    pool.mark_unhealthy("http://other", "run-a")
    pool.mark_unhealthy("http://one", "run-b")
    assert set(await picks(pool)) == {"http://one"}
    assert set(await picks(pool, run_id="run-b")) == {"http://other"}


async def test_static_engines_serve_every_run_while_the_table_is_empty() -> None:
    pool, table = await pool_of(static_urls=["http://static/"])
    assert set(await picks(pool)) == {"http://static"}
    table.endpoints = (A,)
    await pool.refresh()
    assert set(await picks(pool)) == {A.url}


async def test_the_pool_retains_its_engines_while_the_store_is_down() -> None:
    pool, table = await pool_of(A)
    table.endpoints = None
    await pool.refresh()
    assert set(await picks(pool)) == {A.url}


async def test_the_table_is_read_rarely_while_no_calls_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leyden.services.gateway.engine.pool.IDLE_AFTER_SECONDS", -1e9)
    monkeypatch.setattr("leyden.services.gateway.engine.pool.IDLE_FACTOR", 1e6)
    pool, table = await pool_of(A)
    refreshing = asyncio.create_task(pool.run())
    await eventually(lambda: table.reads == 2)
    await asyncio.sleep(0.1)
    assert table.reads == 2
    await picks(pool, rollouts=1)
    await eventually(lambda: table.reads > 2)
    refreshing.cancel()


async def test_a_call_for_one_version_waits_for_an_engine_that_serves_it() -> None:
    older = Endpoint("http://older", "run-a", 2)
    pool, table = await pool_of(A, older)
    for version, url in ((2, older.url), (3, A.url)):
        assert (await pool.pick("run-a", "person", HoldTimeout(60), version=version)).url == url
    table.endpoints = (A,)
    await pool.refresh()
    with pytest.raises(Unavailable):
        await pool.pick("run-a", "person", HoldTimeout(0.05), version=2)
