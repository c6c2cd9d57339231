"""Adapters of a pool across a restart of the controller, and what its users read of one that fails to load."""

from __future__ import annotations

import pytest
from aiohttp import web

from leyden.libs.store.database import Database
from leyden.services.controller.engines.targets import TargetVersion
from tests.contract.controller.test_engines import fleet_of, served_adapters
from tests.fakes.scripted_engine import ScriptedEngine, running
from tests.faults.proxy import FaultProxy, Trouble
from tests.support.waiting import eventually


async def test_the_base_model_serves_on_when_version_1_fails_after_a_restart(
    database: Database, redis_url: str
) -> None:
    engine = ScriptedEngine()
    async with running(engine):
        async with fleet_of(database, redis_url, engine.url, adapters=2) as fleet:
            fleet.set_target(TargetVersion("run-a", 0, "/models/base", "hash"))
            await eventually(lambda: fleet.served_version("run-a") == 0)
        engine.bad_paths = {"/w/a/1/adapter"}
        async with fleet_of(database, redis_url, engine.url, adapters=2) as fleet:
            fleet.set_target(TargetVersion("run-a", 1, "/w/a/1", "hash"))
            await eventually(lambda: engine.journal.count("load run-a:1 /w/a/1/adapter") >= 3)
            assert fleet.served_version("run-a") == 0
            assert await served_adapters(database) == {(engine.url, "run-a", None)}
            engine.bad_paths.clear()
            await eventually(lambda: fleet.served_version("run-a") == 1)


@pytest.mark.parametrize("before", ["nothing", "its own version 0"])
async def test_the_base_model_is_no_version_of_a_run_that_it_did_not_serve(
    database: Database, redis_url: str, before: str
) -> None:
    engine = ScriptedEngine(bad_paths={"/w/a/1/adapter"})
    async with running(engine):
        if before != "nothing":
            async with fleet_of(database, redis_url, engine.url, adapters=2) as fleet:
                fleet.set_target(TargetVersion("run-a", 0, "/w/run-a/versions/0", "hash"))
                await eventually(lambda: fleet.served_version("run-a") == 0)
            # A restarted engine has no adapters.
            engine.adapters.clear()
        async with fleet_of(database, redis_url, engine.url, adapters=2) as fleet:
            fleet.set_target(TargetVersion("run-a", 1, "/w/a/1", "hash"))
            await eventually(lambda: engine.journal.count("load run-a:1 /w/a/1/adapter") >= 3)
            assert fleet.served_version("run-a") is None
            assert await served_adapters(database) == set()


async def test_the_trouble_of_a_run_names_its_own_adapter_alone(database: Database, redis_url: str) -> None:
    engine = ScriptedEngine(bad_paths={"/w/a/1/adapter", "/w/b/1/adapter"})
    async with running(engine):
        with FaultProxy.of(engine.url) as proxy:
            url = proxy.url(engine.url)
            async with fleet_of(database, redis_url, url, adapters=2, answer_seconds=1) as fleet:
                for run in "ab":
                    fleet.set_target(TargetVersion(f"run-{run}", 1, f"/w/{run}/1", "hash"))
                await eventually(lambda: fleet.trouble("run-b") is not None)
                cause = "run-a:1: /load_lora_adapter answered 400: no such file"
                assert (fleet.trouble("run-a") or "").startswith(f"{url}: {cause} (")
                proxy.trouble = Trouble(hang=True)
                await eventually(lambda: "run-a:1" not in (fleet.trouble("run-a") or ""))
                assert url in (fleet.trouble("run-a") or "")


class PartlyLoading(ScriptedEngine):
    """An engine of several ranks, of which one cannot read an adapter the first time."""

    tries = 0
    is_partly_loaded = False

    async def load_adapter(self, request: web.Request) -> web.Response:
        self.tries += 1
        if self.tries > 1 and not self.is_partly_loaded:
            return await super().load_adapter(request)
        self.is_partly_loaded = True
        words = "no such file" if self.tries == 1 else "LoRA adapter 'run-a:1' has an incomplete unload. Retry it."
        return web.json_response({"success": False, "error_message": words}, status=400)

    async def unload_adapter(self, request: web.Request) -> web.Response:
        self.is_partly_loaded = False
        return web.json_response({"success": True, "error_message": ""})


async def test_an_adapter_that_an_engine_has_in_part_is_unloaded_and_loaded_again(
    database: Database, redis_url: str
) -> None:
    engine = PartlyLoading()
    async with running(engine), fleet_of(database, redis_url, engine.url, adapters=2) as fleet:
        fleet.set_target(TargetVersion("run-a", 1, "/w/a/1", "hash"))
        await eventually(lambda: fleet.served_version("run-a") == 1)
        assert engine.tries == 3
