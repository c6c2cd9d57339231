"""The fleet against engines that speak SGLang's control protocol."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest
from redis.asyncio import Redis
from sqlalchemy import select

from leyden.libs.queue.notifications import Notifications, PendingVersion
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.services.controller.engines import EngineClient, Fleet, Wanted
from leyden.services.controller.settings import Settings
from tests.fakes.engine_control import FakeEngineControl, running
from tests.faults.proxy import FaultProxy, Trouble


@asynccontextmanager
async def fleet_of(
    database: Database, redis_url: str, *urls: str, update_seconds: float = 60.0
) -> AsyncIterator[Fleet]:
    notifications = Notifications(redis_url)
    settings = Settings(
        engine_urls=list(urls),
        engine_poll_seconds=0.05,
        engine_refusal_seconds=0.3,
        engine_update_seconds=update_seconds,
    )
    fleet = Fleet(settings, database, notifications)
    keeping = asyncio.create_task(fleet.keep())
    try:
        yield fleet
    finally:
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping
        await notifications.close()


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        await asyncio.sleep(0.01)


async def rows(database: Database) -> dict[str, tuple[str, str | None, int | None]]:
    async with database.read() as session:
        return {
            row.url: (row.state, row.run_id, row.policy_version) for row in await session.scalars(select(tables.Engine))
        }


async def test_engines_are_paused_loaded_and_continued_in_this_order(database: Database, redis_url: str) -> None:
    async with AsyncExitStack() as stack:
        one, two = [await stack.enter_async_context(running(FakeEngineControl())) for _ in range(2)]
        async with fleet_of(database, redis_url, one.url, two.url) as fleet:
            fleet.want(Wanted("run-a", 0, "/w/0"))
            await until(lambda: fleet.served_version("run-a") == 0 and two.weight_version == "run-a:0")
            fleet.want(Wanted("run-a", 1, "/w/1"))
            await until(lambda: "run-a:1" == one.weight_version == two.weight_version)
            await until(lambda: not one.paused and not two.paused and fleet.served_version("run-a") == 1)
            assert one.journal == [
                "continue",
                *("pause retract", "update /w/0 run-a:0 flush=True", "continue"),
                *("pause retract", "update /w/1 run-a:1 flush=True", "continue"),
            ]
            assert fleet.served_version("run-b") is None
            assert fleet.trouble() is None


async def test_weights_are_prepared_before_the_pause_where_an_engine_can(database: Database, redis_url: str) -> None:
    engine = FakeEngineControl(weight_version="run-a:0", prepares=True, bad_paths={"/w/1"})
    async with running(engine), fleet_of(database, redis_url, engine.url) as fleet:
        fleet.want(Wanted("run-a", 1, "/w/1"))
        await until(lambda: fleet.trouble() is not None)
        assert "no such file" in (fleet.trouble() or "")
        # Nobody was held for weights that cannot be loaded.
        assert set(engine.journal) == {"continue", "prepare /w/1 and compute ahead"}
        engine.bad_paths.clear()
        await until(lambda: fleet.served_version("run-a") == 1)
        assert engine.journal[-4:] == [
            *("prepare /w/1 and compute ahead", "pause retract", "update /w/1 run-a:1 flush=True", "continue"),
        ]


async def test_weights_that_are_announced_are_prepared_and_served_once_they_are_wanted(
    database: Database, redis_url: str
) -> None:
    engine = FakeEngineControl(weight_version="run-a:0", prepares=True)
    notifications = Notifications(redis_url)
    async with running(engine), fleet_of(database, redis_url, engine.url) as fleet:
        fleet.want(Wanted("run-a", 0, "/w/0"))
        await until(lambda: fleet.served_version("run-a") == 0)
        async with Redis.from_url(redis_url) as client, asyncio.timeout(60):
            while (await client.pubsub_numsub("{leyden:wake}:coming"))[0][1] == 0:
                await asyncio.sleep(0.02)
            # What nobody of ours says ends nobody.
            await client.publish("{leyden:wake}:coming", "[]")
        await notifications.publish_version(PendingVersion("run-a", 1, "/w/1"))
        await until(lambda: len(engine.journal) == 2)
        assert (engine.journal, engine.weight_version) == (["continue", "prepare /w/1 and compute ahead"], "run-a:0")
        # Another run's, and one that is not the next.
        for run, version in (("run-b", 1), ("run-a", 3)):
            await notifications.publish_version(PendingVersion(run, version, "/w/other"))
        fleet.want(Wanted("run-a", 1, "/w/1"))
        await until(lambda: fleet.served_version("run-a") == 1)
        assert engine.journal[2:] == [
            *("prepare /w/1 and compute ahead", "pause retract", "update /w/1 run-a:1 flush=True", "continue"),
        ]
    await notifications.close()


async def test_weights_recorded_while_an_engine_prepares_them_are_compared_with_their_files_and_served(
    database: Database, redis_url: str
) -> None:
    engine = FakeEngineControl(weight_version="run-a:0", prepares=True)
    engine.preparing.clear()
    async with running(engine), fleet_of(database, redis_url, engine.url) as fleet:
        fleet.want(Wanted("run-a", 0, "/w/0"))
        fleet.expect(Wanted("run-a", 1, "/w/1"))
        await until(lambda: engine.journal[1:] == ["prepare /w/1 and compute ahead"])
        fleet.want(Wanted("run-a", 1, "/w/1"))
        engine.preparing.set()
        await until(lambda: fleet.served_version("run-a") == 1)
        assert engine.journal[2:] == [
            *("prepare /w/1", "pause retract", "update /w/1 run-a:1 flush=True", "continue"),
        ]


async def test_a_step_that_is_made_again_is_prepared_again(database: Database, redis_url: str) -> None:
    engine = FakeEngineControl(weight_version="run-a:0", prepares=True)
    async with running(engine), fleet_of(database, redis_url, engine.url) as fleet:
        fleet.want(Wanted("run-a", 0, "/w/0"))
        for times in (1, 2):
            fleet.expect(Wanted("run-a", 1, "/w/1"))
            await until(lambda: engine.journal[1:] == ["prepare /w/1 and compute ahead"] * times)  # noqa: B023


async def test_files_that_were_replaced_while_an_engine_prepared_them_are_computed_ahead_once_wanted(
    database: Database, redis_url: str
) -> None:
    engine = FakeEngineControl(weight_version="run-a:0", prepares=True)
    engine.preparing.clear()
    async with running(engine), fleet_of(database, redis_url, engine.url) as fleet:
        fleet.want(Wanted("run-a", 0, "/w/0"))
        fleet.expect(Wanted("run-a", 1, "/w/1"))
        await until(lambda: len(engine.journal) == 2)
        fleet.expect(Wanted("run-a", 1, "/w/1"))
        fleet.want(Wanted("run-a", 1, "/w/1"))
        engine.preparing.set()
        await until(lambda: fleet.served_version("run-a") == 1)
        assert engine.journal[1:4] == [*["prepare /w/1 and compute ahead"] * 2, "pause retract"]


async def test_nothing_that_comes_is_prepared_once_another_run_is_wanted(database: Database, redis_url: str) -> None:
    engine = FakeEngineControl(weight_version="run-a:0", prepares=True)
    async with running(engine), fleet_of(database, redis_url, engine.url) as fleet:
        fleet.want(Wanted("run-a", 0, "/w/0"))
        await until(lambda: fleet.served_version("run-a") == 0)
        fleet.expect(Wanted("run-a", 1, "/w/1"))
        fleet.want(Wanted("run-b", 0, "/b/0"))
        await until(lambda: fleet.served_version("run-b") == 0)
        assert engine.journal[1:3] == ["prepare /b/0", "pause retract"]


@pytest.mark.parametrize("begins", ["before the announcement", "after the announcement"])
async def test_nothing_that_comes_is_prepared_while_engines_stay_at_a_version(
    database: Database, redis_url: str, begins: str
) -> None:
    engine = FakeEngineControl(weight_version="run-a:0", prepares=True)
    async with running(engine), fleet_of(database, redis_url, engine.url) as fleet:
        fleet.want(Wanted("run-a", 0, "/w/0"))
        await until(lambda: fleet.served_version("run-a") == 0)
        if begins == "before the announcement":
            fleet.pin(True)
        fleet.expect(Wanted("run-a", 1, "/w/1"))
        fleet.pin(True)
        looks = engine.looks
        await until(lambda: engine.looks > looks + 2)
        assert engine.journal == ["continue"]
        fleet.pin(False)
        fleet.expect(Wanted("run-a", 1, "/w/1"))
        await until(lambda: engine.journal[1:] == ["prepare /w/1 and compute ahead"])


async def test_an_engine_that_prepares_slowly_what_comes_serves_on(database: Database, redis_url: str) -> None:
    engine = FakeEngineControl(weight_version="run-a:0", prepares=True)
    engine.preparing.clear()
    async with running(engine), fleet_of(database, redis_url, engine.url, update_seconds=0.2) as fleet:
        fleet.want(Wanted("run-a", 0, "/w/0"))
        fleet.expect(Wanted("run-a", 1, "/w/1"))
        await until(lambda: len(engine.journal) == 2)
        looks = engine.looks
        await until(lambda: engine.looks > looks + 1)
        # One that was away would be continued again, at first sight.
        assert engine.journal == ["continue", "prepare /w/1 and compute ahead"]
        assert fleet.served_version("run-a") == 0
        engine.preparing.set()


async def test_an_engine_that_is_back_serves_while_it_prepares_what_comes(database: Database, redis_url: str) -> None:
    engine = FakeEngineControl(weight_version="run-a:0")
    async with AsyncExitStack() as stack:
        async with running(engine):
            fleet = await stack.enter_async_context(fleet_of(database, redis_url, engine.url))
            fleet.want(Wanted("run-a", 0, "/w/0"))
            await until(lambda: fleet.served_version("run-a") == 0)
        await until(lambda: fleet.trouble() is not None)
        fleet.expect(Wanted("run-a", 1, "/w/1"))
        again = FakeEngineControl(weight_version="run-a:0", prepares=True)
        again.preparing.clear()
        await stack.enter_async_context(running(again, int(engine.url.rpartition(":")[2])))
        await until(lambda: again.journal == ["continue", "prepare /w/1 and compute ahead"])
        assert fleet.served_version("run-a") == 0
        assert (await rows(database))[engine.url] == ("serving", "run-a", 0)
        again.preparing.set()


async def test_an_engine_that_took_long_to_prepare_what_comes_is_looked_at_again(
    database: Database, redis_url: str
) -> None:
    engine = FakeEngineControl(weight_version="run-a:0", prepares=True)
    engine.preparing.clear()
    async with running(engine), fleet_of(database, redis_url, engine.url, update_seconds=0.5) as fleet:
        fleet.want(Wanted("run-a", 0, "/w/0"))
        fleet.expect(Wanted("run-a", 1, "/w/1"))
        await until(lambda: len(engine.journal) == 2)
        engine.weight_version = "run-a:1"
        fleet.want(Wanted("run-a", 1, "/w/1"))
        await until(lambda: fleet.served_version("run-a") == 1)
        assert engine.journal == ["continue", "prepare /w/1 and compute ahead"]
        engine.preparing.set()


async def test_an_engine_that_cannot_be_reached_to_prepare_what_comes_is_away(
    database: Database, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def vanished(*_: object, **__: object) -> None:
        raise httpx.ConnectTimeout("nobody there")

    monkeypatch.setattr(EngineClient, "prepare", vanished)
    engine = FakeEngineControl(weight_version="run-a:0")
    async with running(engine), fleet_of(database, redis_url, engine.url) as fleet:
        fleet.want(Wanted("run-a", 0, "/w/0"))
        fleet.expect(Wanted("run-a", 1, "/w/1"))
        # One that was away is continued again, at first sight.
        await until(lambda: engine.journal == ["continue", "continue"])


async def test_announced_weights_that_cannot_be_read_change_nothing(database: Database, redis_url: str) -> None:
    engine = FakeEngineControl(weight_version="run-a:0", prepares=True, bad_paths={"/w/1"})
    async with running(engine), fleet_of(database, redis_url, engine.url) as fleet:
        fleet.want(Wanted("run-a", 0, "/w/0"))
        fleet.expect(Wanted("run-a", 1, "/w/1"))
        await until(lambda: len(engine.journal) > 1 and fleet.served_version("run-a") == 0)
        assert fleet.trouble() is None
        engine.bad_paths.clear()
        fleet.want(Wanted("run-a", 1, "/w/1"))
        await until(lambda: fleet.served_version("run-a") == 1)


async def test_what_is_in_flight_for_a_run_is_not_computed_by_the_weights_of_another(
    database: Database, redis_url: str
) -> None:
    engine = FakeEngineControl(weight_version="run-a:1", prepares=True)
    async with running(engine), fleet_of(database, redis_url, engine.url) as fleet:
        fleet.want(Wanted("run-b", 0, "/w/0"))
        await until(lambda: fleet.served_version("run-b") == 0)
        assert engine.journal == [
            *("continue", "prepare /w/0", "pause retract", "update /w/0 run-b:0 flush=True", "continue"),
        ]


async def test_weights_that_cannot_be_loaded_are_told_and_the_engine_goes_on(
    database: Database, redis_url: str
) -> None:
    engine = FakeEngineControl(weight_version="run-a:0", bad_paths={"/w/1"})
    async with running(engine), fleet_of(database, redis_url, engine.url) as fleet:
        fleet.want(Wanted("run-a", 1, "/w/1"))
        await until(lambda: fleet.trouble() is not None)
        assert "no such file" in (fleet.trouble() or "")
        assert not engine.paused
        engine.bad_paths.clear()
        await until(lambda: fleet.served_version("run-a") == 1)


async def test_an_engine_that_restarted_is_brought_back(database: Database, redis_url: str) -> None:
    async with running(FakeEngineControl()) as engine, fleet_of(database, redis_url, engine.url) as fleet:
        fleet.want(Wanted("run-a", 3, "/w/3"))
        await until(lambda: fleet.served_version("run-a") == 3)
        engine.weight_version = "default"
        await until(lambda: engine.weight_version == "run-a:3")
        await until(lambda: fleet.served_version("run-a") == 3)


async def test_an_engine_that_is_away_is_marked_and_found_again(database: Database, redis_url: str) -> None:
    engine = FakeEngineControl(weight_version="run-a:0")
    async with AsyncExitStack() as stack:
        async with running(engine):
            fleet = await stack.enter_async_context(fleet_of(database, redis_url, engine.url))
            await until(lambda: fleet.served_version("run-a") == 0)
        await until(lambda: fleet.served_version("run-a") is None)
        assert (await rows(database))[engine.url][0] == "unreachable"
        # A look that was under way was cut; the next one finds nobody.
        await until(lambda: "ConnectError" in (fleet.trouble() or ""))
        again = FakeEngineControl(weight_version="run-a:0")
        await stack.enter_async_context(running(again, int(engine.url.rpartition(":")[2])))
        await until(lambda: fleet.served_version("run-a") == 0)
        assert again.journal == ["continue"]


async def test_an_engine_left_paused_by_a_killed_controller_goes_on(database: Database, redis_url: str) -> None:
    engine = FakeEngineControl(weight_version="run-a:2", paused=True)
    async with running(engine), fleet_of(database, redis_url, engine.url) as fleet:
        fleet.want(Wanted("run-a", 2, "/w/2"))
        await until(lambda: fleet.served_version("run-a") == 2)
        assert not engine.paused


async def test_engines_no_longer_configured_are_forgotten(database: Database, redis_url: str) -> None:
    async with database.session() as session:
        session.add(tables.Engine(url="http://old", state="serving", run_id="run-a", policy_version=1))
    engine = FakeEngineControl(weight_version="run-a:0")
    async with running(engine), fleet_of(database, redis_url, engine.url) as fleet:
        await until(lambda: fleet.served_version("run-a") == 0)
        assert await rows(database) == {engine.url: ("serving", "run-a", 0)}


async def test_an_engine_that_hangs_in_the_middle_of_an_update_does_not_hold_up_another(
    database: Database, redis_url: str
) -> None:
    one, two = FakeEngineControl(), FakeEngineControl()
    async with running(one), running(two):
        with FaultProxy.of(one.url) as proxy:
            async with fleet_of(database, redis_url, proxy.url(one.url), two.url) as fleet:
                fleet.want(Wanted("run-a", 0, "/w/0"))
                await until(lambda: one.weight_version == two.weight_version == "run-a:0")
                proxy.trouble = Trouble(hang=True)
                for version in (1, 2):
                    fleet.want(Wanted("run-a", version, f"/w/{version}"))
                    await until(lambda: two.weight_version == f"run-a:{version}")  # noqa: B023
                proxy.heal()
                await until(lambda: one.weight_version == "run-a:2" and not one.paused, 60)


@pytest.mark.parametrize("garbage", [b"[]", b"null", b"not json", b'"run-a:0"', b"\xff\xfe"])
async def test_an_engine_that_answers_garbage_is_away_until_it_makes_sense(
    database: Database, redis_url: str, garbage: bytes
) -> None:
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (len(garbage), garbage)
    async with running(FakeEngineControl(weight_version="run-a:0")) as engine:
        with FaultProxy.of(engine.url) as proxy:
            async with fleet_of(database, redis_url, proxy.url(engine.url)) as fleet:
                await until(lambda: fleet.served_version("run-a") == 0)
                proxy.trouble = Trouble(answer=answer)
                await until(lambda: fleet.served_version("run-a") is None)
                assert fleet.trouble() is not None
                proxy.heal()
                await until(lambda: fleet.served_version("run-a") == 0)
