"""The controller's engine reconciliation against engines that speak SGLang's control protocol."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from sqlalchemy import select

from leyden.libs.contracts.weights import weights_sha256
from leyden.libs.queue.notifications import Notifications, Topic
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.engines import serving_engines
from leyden.services.controller.engines import files as weights
from leyden.services.controller.engines.discovery import FoundEngines, StaticEngines
from leyden.services.controller.engines.files import WeightCheck, WeightsLost
from leyden.services.controller.engines.fleet import Fleet
from leyden.services.controller.engines.targets import TargetVersion
from leyden.services.controller.settings import Settings
from leyden.services.controller.worker import make_fleet
from tests.fakes.scripted_engine import ScriptedEngine, running
from tests.faults.proxy import FaultProxy, Trouble
from tests.support import builders
from tests.support.waiting import eventually


@asynccontextmanager
async def fleet_of(
    database: Database,
    redis_url: str,
    *urls: str,
    update_seconds: float = 60.0,
    answer_seconds: float = 5.0,
    refusal_seconds: float = 0.3,
    adapters: int | None = None,
    assigned: bool = True,
    **others: Any,
) -> AsyncIterator[Fleet]:
    """Args: others: further settings"""
    notifications = Notifications(redis_url)
    settings = Settings(
        engine_urls=list(urls),
        engine_poll_seconds=0.05,
        engine_answer_seconds=answer_seconds,
        engine_refusal_seconds=refusal_seconds,
        engine_update_seconds=update_seconds,
        **others,
    )
    engines = StaticEngines(frozenset(settings.engine_urls))
    fleet = make_fleet(settings, engines, database, notifications, adapters=adapters)
    if assigned:
        fleet.retain_targets(())
    task = asyncio.create_task(fleet.run())
    try:
        yield fleet
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await notifications.close()


def metric(name: str, pool: str = "default") -> float | None:
    return REGISTRY.get_sample_value(name, {"pool": pool})


async def rows(database: Database) -> dict[str, tuple[str, str | None, int | None]]:
    async with database.read() as session:
        return {
            row.url: (row.state, row.run_id, row.policy_version) for row in await session.scalars(select(tables.Engine))
        }


async def test_engines_are_paused_loaded_and_continued_in_this_order(database: Database, redis_url: str) -> None:
    async with AsyncExitStack() as stack:
        one, two = [await stack.enter_async_context(running(ScriptedEngine())) for _ in range(2)]
        async with fleet_of(database, redis_url, one.url, two.url) as fleet:
            fleet.set_target(TargetVersion("run-a", 0, "/w/0", "hash"))
            await eventually(lambda: fleet.served_version("run-a") == 0 and two.weight_version == "run-a:0")
            fleet.set_target(TargetVersion("run-a", 1, "/w/1", "hash"))
            await eventually(lambda: "run-a:1" == one.weight_version == two.weight_version)
            await eventually(lambda: not one.paused and not two.paused and fleet.served_version("run-a") == 1)
            assert one.journal == [
                "continue",
                *("pause retract", "update /w/0 run-a:0 flush=True", "continue"),
                *("pause retract", "update /w/1 run-a:1 flush=True", "continue"),
            ]
            assert fleet.served_version("run-b") is None
            assert fleet.trouble("run-a") is None


async def test_each_pause_for_new_weights_is_kept_while_the_run_is_there(database: Database, redis_url: str) -> None:
    run = await builders.add_run(database)
    async with running(ScriptedEngine()) as engine, fleet_of(database, redis_url, engine.url) as fleet:
        for run_id, version in ((run.id, 0), ("run-gone", 0), (run.id, 1)):
            fleet.set_target(TargetVersion(run_id, version, f"/w/{run_id}/{version}", "hash"))
            await eventually(lambda wanted=(run_id, version): fleet.served_version(wanted[0]) == wanted[1])
    async with database.read() as session:
        swaps = list(await session.scalars(select(tables.WeightSwap).order_by(tables.WeightSwap.number)))
    assert [(one.run_id, one.policy_version, one.url) for one in swaps] == [
        (run.id, version, engine.url) for version in (0, 1)
    ]
    assert all(0 < one.seconds < 60 for one in swaps)


async def test_runs_share_an_engine_with_an_adapter_each(database: Database, redis_url: str) -> None:
    async def served() -> list[tuple[str, int | None, str | None]]:
        async with database.read() as session:
            return [(one.run_id, one.policy_version, one.adapter) for one in await serving_engines(session)]

    engine = ScriptedEngine()
    async with running(engine), fleet_of(database, redis_url, engine.url, adapters=2) as fleet:
        fleet.set_target(TargetVersion("run-a", 0, "/w/a/0", "hash"))
        fleet.set_target(TargetVersion("run-b", 3, "/w/b/3", "hash"))
        await eventually(lambda: (fleet.served_version("run-a"), fleet.served_version("run-b")) == (0, 3))
        assert await served() == [("run-a", 0, None), ("run-b", 3, "run-b:3")]
        for version in (4, 5):
            fleet.set_target(TargetVersion("run-b", version, f"/w/b/{version}", "hash"))
            await eventually(lambda wanted=version: fleet.served_version("run-b") == wanted)
        # The version before stays for calls that a gateway sends before it reads of the new one.
        await eventually(lambda: set(engine.adapters) == {"run-b:4", "run-b:5"})
        fleet.set_target(TargetVersion("run-a", 1, "/w/a/1", "hash"))
        fleet.retain_targets({"run-a"})
        await eventually(lambda: set(engine.adapters) == {"run-a:1"} and fleet.served_version("run-b") is None)
        assert await served() == [("run-a", 1, "run-a:1")]
        # A restarted engine has no adapters.
        engine.adapters.clear()
        await eventually(lambda: engine.adapters == {"run-a:1": "/w/a/1/adapter"})
        assert not any("pause" in line or "update" in line for line in engine.journal)


async def test_an_adapter_that_cannot_be_loaded_delays_its_run_alone(database: Database, redis_url: str) -> None:
    engine = ScriptedEngine(bad_paths={"/w/a/1/adapter"})
    async with running(engine), fleet_of(database, redis_url, engine.url, adapters=2) as fleet:
        fleet.set_target(TargetVersion("run-a", 1, "/w/a/1", "hash"))
        fleet.set_target(TargetVersion("run-b", 1, "/w/b/1", "hash"))
        await eventually(lambda: fleet.served_version("run-b") == 1)
        assert fleet.served_version("run-a") is None
        assert "run-a:1" in (fleet.trouble("run-a") or "") and fleet.trouble("run-b") is None
        fleet.retain_targets({"run-a", "run-b"})
        assert (metric("controller_engines_serving"), metric("controller_runs_unserved")) == (0, 1)
        engine.bad_paths.clear()
        await eventually(lambda: fleet.served_version("run-a") == 1)


async def served_adapters(database: Database) -> set[tuple[str, str, str | None]]:
    async with database.read() as session:
        return {(one.url, one.run_id, one.adapter) for one in await serving_engines(session)}


@pytest.mark.parametrize("first", [0, 1])
async def test_a_version_that_cannot_be_loaded_leaves_the_one_before(
    database: Database, redis_url: str, first: int
) -> None:
    engine = ScriptedEngine()
    async with running(engine), fleet_of(database, redis_url, engine.url, adapters=2) as fleet:
        fleet.set_target(TargetVersion("run-a", first, f"/w/a/{first}", "hash"))
        fleet.set_target(TargetVersion("run-b", 1, "/w/b/1", "hash"))
        await eventually(lambda: (fleet.served_version("run-a"), fleet.served_version("run-b")) == (first, 1))
        loaded, before = set(engine.adapters), await served_adapters(database)
        assert metric("controller_engines_serving") == 1
        engine.bad_paths = {"/w/a/2/adapter"}
        fleet.set_target(TargetVersion("run-a", 2, "/w/a/2", "hash"))
        await eventually(lambda: engine.journal.count("load run-a:2 /w/a/2/adapter") >= 3)
        assert fleet.served_version("run-a") == first and set(engine.adapters) == loaded
        assert await served_adapters(database) == before
        assert "run-a:2" in (fleet.trouble("run-a") or "") and fleet.trouble("run-b") is None
        assert (metric("controller_engines_serving"), metric("controller_runs_unserved")) == (0, 0)
        engine.bad_paths.clear()
        await eventually(lambda: fleet.served_version("run-a") == 2)
        assert metric("controller_engines_serving") == 1 and fleet.trouble("run-a") is None


async def test_the_version_before_outlives_the_controller_that_failed_to_load_the_next(
    database: Database, redis_url: str
) -> None:
    engine = ScriptedEngine(
        adapters={"run-a:9": "/w/a/9/adapter", "run-a:10": "/w/a/10/adapter"}, bad_paths={"/w/a/11/adapter"}
    )
    async with running(engine), fleet_of(database, redis_url, engine.url, adapters=2) as fleet:
        fleet.set_target(TargetVersion("run-a", 11, "/w/a/11", "hash"))
        await eventually(lambda: fleet.served_version("run-a") == 10)
        engine.bad_paths.clear()
        await eventually(lambda: fleet.served_version("run-a") == 11)
        await eventually(lambda: set(engine.adapters) == {"run-a:10", "run-a:11"})


async def test_an_engine_that_fails_to_load_a_version_holds_back_no_run_that_another_one_serves(
    database: Database, redis_url: str
) -> None:
    one, two = ScriptedEngine(), ScriptedEngine()
    async with running(one), running(two), fleet_of(database, redis_url, one.url, two.url, adapters=2) as fleet:
        fleet.set_target(TargetVersion("run-a", 1, "/w/a/1", "hash"))
        await eventually(lambda: "run-a:1" in one.adapters and "run-a:1" in two.adapters)
        # Both are stored: an engine whose first poll still runs may be stored with version 1 later.
        await eventually(lambda: metric("controller_engines_serving") == 2)
        two.bad_paths = {"/w/a/2/adapter"}
        fleet.set_target(TargetVersion("run-a", 2, "/w/a/2", "hash"))
        await eventually(lambda: fleet.served_version("run-a") == 2)
        assert await served_adapters(database) == {(one.url, "run-a", "run-a:2")}
        # Calls that it answers with the version before may end.
        assert set(two.adapters) == {"run-a:1"}


async def test_an_older_version_counts_once_every_engine_has_left_the_newer_one(
    database: Database, redis_url: str
) -> None:
    one, two = ScriptedEngine(), ScriptedEngine()
    async with running(one), running(two):
        with FaultProxy.of(two.url) as proxy:
            urls = one.url, proxy.url(two.url)
            async with fleet_of(database, redis_url, *urls, adapters=2) as fleet:
                fleet.set_target(TargetVersion("run-a", 5, "/w/a/5", "hash"))
                await eventually(lambda: "run-a:5" in one.adapters and "run-a:5" in two.adapters)
                await eventually(lambda: metric("controller_engines_serving") == 2)
                proxy.trouble = Trouble(hang=True)
                fleet.set_target(TargetVersion("run-a", 3, "/w/a/3", "hash"))
                await eventually(lambda: metric("controller_engines_serving") == 1)
                assert fleet.served_version("run-a") is None
                proxy.heal()
                await eventually(lambda: fleet.served_version("run-a") == 3)
                assert "run-a:3" in two.adapters


async def test_an_engine_that_frees_an_adapter_slowly_serves_its_runs_meanwhile(
    database: Database, redis_url: str
) -> None:
    engine = ScriptedEngine(adapters={"run-y:9": "/w/y/9/adapter", "run-z:9": "/w/z/9/adapter"}, frees=asyncio.Event())
    slowly = {"answer_seconds": 0.2, "update_seconds": 0.2, "refusal_seconds": 60}
    async with running(engine), fleet_of(database, redis_url, engine.url, adapters=2, **slowly) as fleet:
        engine.adapters["run-a:1"] = "/w/a/1/adapter"
        fleet.set_target(TargetVersion("run-a", 1, "/w/a/1", "hash"))
        await eventually(lambda: "unload run-y:9" in engine.journal and fleet.served_version("run-a") == 1)
        fleet.set_target(TargetVersion("run-a", 2, "/w/a/2", "hash"))
        await eventually(lambda: engine.journal.count("load run-a:2 /w/a/2/adapter") >= 3)
        assert fleet.served_version("run-a") == 1
        assert await rows(database) == {engine.url: ("serving", None, None)}
        asked = ["unload run-y:9", "unload run-z:9"]
        assert [line for line in engine.journal if line.startswith("unload")] == asked
        engine.frees.set()
        await eventually(lambda: fleet.served_version("run-a") == 2)
        await eventually(lambda: set(engine.adapters) == {"run-a:1", "run-a:2"})
        assert [line for line in engine.journal if line.startswith("unload")] == asked


async def test_shared_engines_are_left_alone_until_the_targets_are_complete(database: Database, redis_url: str) -> None:
    engine = ScriptedEngine(adapters={"run-a:1": "/w/a/1/adapter", "run-b:1": "/w/b/1/adapter"})
    async with running(engine), fleet_of(database, redis_url, engine.url, adapters=2, assigned=False) as fleet:
        fleet.set_target(TargetVersion("run-a", 1, "/w/a/1", "hash"))
        await eventually(lambda: "continue" in engine.journal)
        fleet.set_target(TargetVersion("run-b", 1, "/w/b/1", "hash"))
        fleet.retain_targets({"run-a", "run-b"})
        await eventually(lambda: (fleet.served_version("run-a"), fleet.served_version("run-b")) == (1, 1))
        assert not any("load" in line for line in engine.journal)


async def test_version_0_of_a_continued_run_is_an_adapter(database: Database, redis_url: str) -> None:
    engine = ScriptedEngine()
    async with running(engine), fleet_of(database, redis_url, engine.url, adapters=2) as fleet:
        fleet.set_target(TargetVersion("run-a", 0, "/w/run-a/versions/0", "hash"))
        await eventually(lambda: fleet.served_version("run-a") == 0)
        assert engine.adapters == {"run-a:0": "/w/run-a/versions/0/adapter"}


async def test_lost_adapters_of_several_runs_are_known_until_they_are_restored(
    database: Database, redis_url: str, tmp_path: Path
) -> None:
    engine = ScriptedEngine()
    folders = [tmp_path / run_id / "1" for run_id in ("run-a", "run-b")]
    for folder in folders:
        folder.parent.mkdir()
    async with running(engine), fleet_of(database, redis_url, engine.url, adapters=2) as fleet:
        for folder in folders:
            fleet.set_target(TargetVersion(folder.parent.name, 1, str(folder), "hash"))
        for _ in range(3):
            await eventually(lambda: (fleet.lost_version("run-a"), fleet.lost_version("run-b")) == (1, 1))
        assert engine.adapters == {}


async def test_a_run_that_is_over_is_unserved_no_longer(database: Database, redis_url: str) -> None:
    engine = ScriptedEngine(bad_paths={"/w/1"})
    async with running(engine), fleet_of(database, redis_url, engine.url) as fleet:
        fleet.set_target(TargetVersion("run-a", 1, "/w/1", "hash"))
        for runs, unserved in (({"run-a"}, 1), (set[str](), 0)):
            fleet.retain_targets(runs)
            assert metric("controller_runs_unserved") == unserved


async def test_unloadable_weights_are_reported_and_the_engine_continues(database: Database, redis_url: str) -> None:
    engine = ScriptedEngine(weight_version="run-a:0", bad_paths={"/w/1"})
    async with running(engine), fleet_of(database, redis_url, engine.url) as fleet:
        fleet.set_target(TargetVersion("run-a", 1, "/w/1", "hash"))
        await eventually(lambda: fleet.trouble("run-a") is not None)
        assert "no such file" in (fleet.trouble("run-a") or "")
        assert not engine.paused
        engine.bad_paths.clear()
        await eventually(lambda: fleet.served_version("run-a") == 1)


@pytest.mark.parametrize(
    ("updates", "cause"),
    [
        ("ignored", "it answered that it loaded version 1, and still serves 'run-a:0'"),
        ("never", "/update_weights_from_disk had no answer within 0.2 s"),
    ],
)
async def test_an_engine_that_stays_at_its_version_is_named_and_asked_at_growing_pauses(
    database: Database, redis_url: str, updates: str, cause: str
) -> None:
    engine = ScriptedEngine(weight_version="run-a:0", updates=updates)
    async with running(engine), fleet_of(database, redis_url, engine.url, update_seconds=0.2) as fleet:
        began = time.monotonic()
        fleet.set_target(TargetVersion("run-a", 1, "/w/1", "hash"))
        await eventually(lambda: fleet.trouble("run-a") is not None)
        seen = set[str | None]()
        while len([line for line in engine.journal if line.startswith("update")]) < 4:
            seen.add(fleet.trouble("run-a"))
            await asyncio.sleep(0.01)
        # After pauses of 0.3, 0.6 and 1.2 s, instead of one of 0.05 s each time.
        assert time.monotonic() - began > 2.0
        assert None not in seen and all(cause in str(one) and " since " in str(one) for one in seen)
        await eventually(lambda: "tries" in str(fleet.trouble("run-a")) and not engine.paused)
        assert fleet.served_version("run-a") is None
        engine.updates = "loaded"
        await eventually(lambda: fleet.served_version("run-a") == 1)
        assert fleet.trouble("run-a") is None


async def test_a_first_load_that_lasts_is_named_with_its_beginning(database: Database, redis_url: str) -> None:
    engine = ScriptedEngine(updates="never")
    async with running(engine), fleet_of(database, redis_url, engine.url, answer_seconds=4) as fleet:
        fleet.set_target(TargetVersion("run-a", 1, "/w/1", "hash"))
        await eventually(lambda: engine.paused)
        assert fleet.trouble("run-a") is None
        await eventually(lambda: "loading version 1 since" in (fleet.trouble("run-a") or ""))


async def test_an_engine_that_restarted_is_offered_its_version_at_once(database: Database, redis_url: str) -> None:
    engine = ScriptedEngine(updates="ignored")
    async with (
        running(engine),
        fleet_of(database, redis_url, engine.url, refusal_seconds=300) as fleet,
    ):
        fleet.set_target(TargetVersion("run-a", 1, "/w/1", "hash"))
        await eventually(lambda: fleet.trouble("run-a") is not None)
        engine.updates, engine.weight_version = "loaded", "restarted"
        await eventually(lambda: fleet.served_version("run-a") == 1)


async def test_an_engine_that_has_no_adapter_after_loading_it_is_asked_at_growing_pauses(
    database: Database, redis_url: str
) -> None:
    engine = ScriptedEngine(updates="ignored")
    async with running(engine), fleet_of(database, redis_url, engine.url, adapters=2) as fleet:
        began = time.monotonic()
        fleet.set_target(TargetVersion("run-a", 1, "/w/1", "hash"))
        await eventually(lambda: "does not list it (1 try since" in (fleet.trouble("run-a") or ""))
        await eventually(lambda: engine.journal.count("load run-a:1 /w/1/adapter") >= 4)
        # After pauses of 0.3, 0.6 and 1.2 s.
        assert time.monotonic() - began > 2.0
        engine.updates = "loaded"
        await eventually(lambda: fleet.served_version("run-a") == 1)


def written(folder: Path, content: bytes) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(content)
    return weights_sha256(folder)


async def test_damaged_weights_are_moved_aside_and_loaded_once_they_are_whole(
    database: Database, redis_url: str, tmp_path: Path
) -> None:
    folder, engine = tmp_path / "versions" / "1", ScriptedEngine(weight_version="run-a:0")
    target = TargetVersion("run-a", 1, str(folder), written(folder, b"the weights"))
    written(folder, b"the weightz")
    async with running(engine), fleet_of(database, redis_url, engine.url) as fleet:
        fleet.set_target(target)
        await eventually(lambda: fleet.lost_version("run-a") == 1 and fleet.trouble("run-a") is not None)
        assert "damaged or lost" in (fleet.trouble("run-a") or "")
        assert engine.journal == ["continue"]
        (aside,) = folder.parent.iterdir()
        assert aside.name.startswith("1.damaged-")
        assert (aside / "model.safetensors").read_bytes() == b"the weightz"
        written(folder, b"the weights")
        await eventually(lambda: fleet.served_version("run-a") == 1)
        assert fleet.lost_version("run-a") is None


async def test_a_damaged_model_folder_is_refused_and_left_in_its_place(
    database: Database, redis_url: str, tmp_path: Path
) -> None:
    folder, engine = tmp_path / "model", ScriptedEngine()
    target = TargetVersion("run-a", 0, str(folder), written(folder, b"the model"))
    written(folder, b"another")
    async with running(engine), fleet_of(database, redis_url, engine.url) as fleet:
        fleet.set_target(target)
        await eventually(lambda: "restore the model folder" in (fleet.trouble("run-a") or ""))
        assert engine.journal == ["continue"]
        written(folder, b"the model")
        await eventually(lambda: fleet.served_version("run-a") == 0)


async def test_weights_are_hashed_once_and_again_when_a_file_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, hashed, check = tmp_path / "1", list[Path](), WeightCheck()
    target = TargetVersion("run-a", 1, str(folder), written(folder, b"the weights"))

    def counting(path: Path) -> str:
        hashed.append(path)
        return weights_sha256(path)

    monkeypatch.setattr(weights, "weights_sha256", counting)
    await asyncio.gather(*(check.check(target) for _ in range(3)))
    assert hashed == [folder]
    written(folder, b"the Weights")
    with pytest.raises(WeightsLost):
        await check.check(target)
    assert hashed == [folder, folder]
    with pytest.raises(WeightsLost):
        await check.check(target)
    assert hashed == [folder, folder]


async def test_weights_that_come_back_are_lost_no_longer(tmp_path: Path) -> None:
    folder, check = tmp_path / "1", WeightCheck()
    target = TargetVersion("run-a", 1, str(folder), written(folder, b"the weights"))
    await check.check(target)
    folder.rename(tmp_path / "away")
    with pytest.raises(WeightsLost):
        await check.check(target)
    assert check.lost == {"run-a": target}
    (tmp_path / "away").rename(folder)
    await check.check(target)
    assert check.lost == {}


async def test_an_engine_that_restarted_is_brought_back(database: Database, redis_url: str) -> None:
    async with running(ScriptedEngine()) as engine, fleet_of(database, redis_url, engine.url) as fleet:
        fleet.set_target(TargetVersion("run-a", 3, "/w/3", "hash"))
        await eventually(lambda: fleet.served_version("run-a") == 3)
        engine.weight_version = "default"
        await eventually(lambda: engine.weight_version == "run-a:3")
        await eventually(lambda: fleet.served_version("run-a") == 3)


async def test_an_unreachable_engine_is_marked_and_recovers(database: Database, redis_url: str) -> None:
    engine = ScriptedEngine(weight_version="run-a:0")
    async with AsyncExitStack() as stack:
        async with running(engine):
            fleet = await stack.enter_async_context(fleet_of(database, redis_url, engine.url))
            await eventually(lambda: fleet.served_version("run-a") == 0)
        await eventually(lambda: fleet.served_version("run-a") is None)
        assert (await rows(database))[engine.url][0] == "unreachable"
        # A poll under way was cut; the next one finds nobody.
        await eventually(lambda: "ConnectError" in (fleet.trouble("run-a") or ""))
        again = ScriptedEngine(weight_version="run-a:0")
        await stack.enter_async_context(running(again, int(engine.url.rpartition(":")[2])))
        await eventually(lambda: fleet.served_version("run-a") == 0)
        assert again.journal == ["continue"]


async def test_an_engine_left_paused_by_a_killed_controller_is_resumed(database: Database, redis_url: str) -> None:
    engine = ScriptedEngine(weight_version="run-a:2", paused=True)
    async with running(engine), fleet_of(database, redis_url, engine.url) as fleet:
        fleet.set_target(TargetVersion("run-a", 2, "/w/2", "hash"))
        await eventually(lambda: fleet.served_version("run-a") == 2)
        assert not engine.paused


async def test_engines_no_longer_configured_are_forgotten(database: Database, redis_url: str) -> None:
    async with database.session() as session:
        session.add(tables.Engine(url="http://old", state="serving", run_id="run-a", policy_version=1))
    engine = ScriptedEngine(weight_version="run-a:0")
    async with running(engine), fleet_of(database, redis_url, engine.url) as fleet:
        await eventually(lambda: fleet.served_version("run-a") == 0)
        assert await rows(database) == {engine.url: ("serving", "run-a", 0)}


async def test_a_new_engine_serves_no_run_before_it_has_the_version_of_the_run(
    database: Database, redis_url: str
) -> None:
    states: list[tuple[str, str | None, int | None]] = []
    engine = ScriptedEngine(weight_version="run-a:0")
    async with running(engine):

        class Watched(Notifications):
            async def notify(self, *topics: Topic) -> None:
                states.extend((await rows(database)).values())
                await super().notify(*topics)

        notifications = Watched(redis_url)
        fleet = make_fleet(
            Settings(engine_poll_seconds=0.05), StaticEngines(frozenset({engine.url})), database, notifications
        )
        # The engine still has an old version, as after a partition.
        fleet.set_target(TargetVersion("run-a", 3, "/w/3", "hash"))
        task = asyncio.create_task(fleet.run())
        await eventually(lambda: ("serving", "run-a", 3) in states)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await notifications.close()
    assert list(dict.fromkeys(states)) == [("updating", None, None), ("serving", "run-a", 3)]


async def test_engines_follow_discovery(database: Database, redis_url: str) -> None:
    class Discovery:
        found = FoundEngines(frozenset())

        async def find(self) -> FoundEngines:
            return self.found

    discovery, notifications = Discovery(), Notifications(redis_url)
    fleet = make_fleet(Settings(engine_poll_seconds=0.05), discovery, database, notifications)
    fleet.set_target(TargetVersion("run-a", 1, "/w/1", "hash"))
    async with AsyncExitStack() as stack:
        one, two = [await stack.enter_async_context(running(ScriptedEngine())) for _ in range(2)]
        task = asyncio.create_task(fleet.run())
        await eventually(lambda: fleet.trouble("run-a") == "pool default has no engine")
        discovery.found = FoundEngines(frozenset({one.url}))
        await eventually(lambda: fleet.served_version("run-a") == 1)
        # A pod that ends answers what it has; its successor serves nothing before it has the run's version.
        discovery.found = FoundEngines(frozenset({two.url}), draining=frozenset({one.url}))
        await eventually(lambda: two.weight_version == "run-a:1" and fleet.served_version("run-a") == 1)
        assert await rows(database) == {one.url: ("draining", None, None), two.url: ("serving", "run-a", 1)}
        fleet.set_target(TargetVersion("run-a", 2, "/w/2", "hash"))
        await eventually(lambda: fleet.served_version("run-a") == 2)
        assert (one.weight_version, two.weight_version) == ("run-a:1", "run-a:2")
        discovery.found = FoundEngines(frozenset({two.url}))

        async def is_alone() -> bool:
            return await rows(database) == {two.url: ("serving", "run-a", 2)}

        await eventually(is_alone)
        polled = len(one.journal)
        await asyncio.sleep(0.2)
        assert len(one.journal) == polled
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await notifications.close()


async def test_an_engine_that_hangs_in_the_middle_of_an_update_does_not_hold_up_another(
    database: Database, redis_url: str
) -> None:
    one, two = ScriptedEngine(), ScriptedEngine()
    async with running(one), running(two):
        with FaultProxy.of(one.url) as proxy:
            async with fleet_of(database, redis_url, proxy.url(one.url), two.url) as fleet:
                fleet.set_target(TargetVersion("run-a", 0, "/w/0", "hash"))
                await eventually(lambda: one.weight_version == two.weight_version == "run-a:0")
                proxy.trouble = Trouble(hang=True)
                for version in (1, 2):
                    fleet.set_target(TargetVersion("run-a", version, f"/w/{version}", "hash"))
                    await eventually(lambda: two.weight_version == f"run-a:{version}")  # noqa: B023
                proxy.heal()
                await eventually(lambda: one.weight_version == "run-a:2" and not one.paused, seconds=60)


@pytest.mark.parametrize("garbage", [b"[]", b"null", b"not json", b'"run-a:0"', b"\xff\xfe"])
async def test_an_engine_that_answers_garbage_is_unreachable_until_it_answers_correctly(
    database: Database, redis_url: str, garbage: bytes
) -> None:
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (len(garbage), garbage)
    async with running(ScriptedEngine(weight_version="run-a:0")) as engine:
        with FaultProxy.of(engine.url) as proxy:
            async with fleet_of(database, redis_url, proxy.url(engine.url)) as fleet:
                await eventually(lambda: fleet.served_version("run-a") == 0)
                proxy.trouble = Trouble(answer=answer)
                await eventually(lambda: fleet.served_version("run-a") is None)
                assert fleet.trouble("run-a") is not None
                proxy.heal()
                await eventually(lambda: fleet.served_version("run-a") == 0)
