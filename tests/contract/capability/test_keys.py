"""Keys between services: the engine's two keys and the key ring of agents' keys; and the addresses of all ports."""

from __future__ import annotations

import asyncio
import importlib
import ipaddress
import json
import pkgutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import leyden.services
from leyden.libs.capability import KeyRing, sign, write_keys
from leyden.libs.contracts.capability import Capability, Scope
from leyden.libs.contracts.weights import weights_sha256
from leyden.libs.queue.notifications import Notifications
from leyden.libs.service import ServiceSettings, serving
from leyden.libs.store.database import Database
from leyden.services.controller.engines.discovery import StaticEngines
from leyden.services.controller.engines.targets import TargetVersion
from leyden.services.controller.settings import Settings as ControllerSettings
from leyden.services.controller.worker import make_fleet
from leyden.services.engine.app import create_engine_app
from leyden.services.engine.auth import CONTROL
from leyden.services.engine.settings import Settings as EngineSettings
from tests.contract.gateway.test_process import client_of, free_port, gateway_process
from tests.fakes.gateway import all_calls, running_gateway, scene
from tests.support import builders
from tests.support.waiting import eventually

HI: list[Any] = [{"role": "user", "content": "hi"}]
API_KEY, ADMIN_KEY = "k" * 32, "a" * 32
PATIENCE_SECONDS = 60.0


def keys_of(folder: Path) -> dict[str, Path]:
    paths = {}
    for name, secret in (("api", API_KEY), ("admin", ADMIN_KEY)):
        paths[name] = folder / f"engine-{name}"
        paths[name].write_text(secret + "\n")
        paths[name].chmod(0o600)
    return paths


@asynccontextmanager
async def locked_engine(folder: Path, model: Path, version: str) -> AsyncIterator[str]:
    keys = keys_of(folder)
    settings = EngineSettings(
        model_path=model,
        weight_version=version,
        threads=1,
        api_key_file=keys["api"],
        admin_api_key_file=keys["admin"],
    )
    async with serving(create_engine_app(settings), shutdown_seconds=2) as port:
        yield f"http://127.0.0.1:{port}"


async def test_the_engine_accepts_the_keys_of_gateway_and_controller(tmp_path, database, redis_url, tiny_model):
    run = await builders.add_run(database)
    _, (rollout, _) = await builders.add_group(database, run)
    await builders.add_attempt(database, rollout)
    keys, notifications = keys_of(tmp_path), Notifications(redis_url)
    async with locked_engine(tmp_path, tiny_model, f"{run.id}:0") as url, httpx.AsyncClient(base_url=url) as http:
        settings = ControllerSettings(
            engine_urls=[url],
            engine_poll_seconds=0.05,
            engine_api_key_file=keys["api"],
            engine_admin_key_file=keys["admin"],
        )
        fleet = make_fleet(settings, StaticEngines(frozenset(settings.engine_urls)), database, notifications)
        fleet.set_target(TargetVersion(run.id, 1, str(tiny_model), weights_sha256(tiny_model)))
        running_fleet = asyncio.create_task(fleet.run())

        async def serves() -> bool:
            return fleet.served_version(run.id) == 1

        await eventually(serves)
        async with running_gateway(
            tmp_path, model_path=tiny_model, database_url=database.dsn, run_id=run.id, engine_api_key_file=keys["api"]
        ) as gateway:
            async with gateway.client(rollout.id) as client:
                await client.chat.completions.create(model="m", messages=HI, max_tokens=4)
                await _hang_up(client, database)
            for name, key in {"nobody": None, "agent": gateway.key(rollout.id), "gateway": API_KEY}.items():
                headers = {} if key is None else {"authorization": f"Bearer {key}"}
                for path in sorted(CONTROL):
                    answer = await http.post(path, json={"rid": "x"}, headers=headers)
                    assert (answer.status_code, answer.json()) == (401, {"error": "Unauthorized"}), (name, path)
                answers = [
                    await http.post("/generate", json={"input_ids": [1]}, headers=headers),
                    await http.get("/model_info", headers=headers),
                ]
                expected = 200 if name == "gateway" else 401
                assert [answer.status_code for answer in answers] == [expected] * 2, name
        running_fleet.cancel()
        with suppress(asyncio.CancelledError):
            await running_fleet
    await notifications.close()


async def _hang_up(client: openai.AsyncOpenAI, database: Database) -> None:
    """The gateway may not abort by request: it closes the connection, and the engine has nothing left to do."""
    stream: Any = await client.chat.completions.create(model="m", messages=HI, max_tokens=200, stream=True)
    async for _ in stream:
        break
    await stream.response.aclose()

    async def recorded() -> bool:
        return len(await all_calls(database)) == 2

    await eventually(recorded)
    _, call = await all_calls(database)
    assert (call.status, call.trainable) in {("aborted", False), ("completed", True)}


async def test_a_key_ring_is_turned_without_a_restart(tmp_path, database):
    port = free_port()
    async with scene(tmp_path, database, says=lambda _: [0]) as stage:
        ring = KeyRing(stage.folder / "keys.json")
        capability = Capability(
            run_id=stage.run_id,
            rollout_id=stage.rollout_id,
            attempt=1,
            scopes=frozenset({Scope.MODEL}),
            expires_at=int(time.time()) + 600,
        )

        async def opens(key: str) -> bool:
            async with client_of(stage, port) as client:
                try:
                    await client.with_options(api_key=key).models.list()
                except openai.AuthenticationError:
                    return False
                return True

        async with gateway_process(stage, port):
            old = sign(ring, capability)
            assert await opens(old)
            write_keys(stage.folder / "keys.json", {"new": "n" * 40, "test": "s" * 40})
            new = sign(ring, capability)
            assert new != old
            assert [await opens(new), await opens(old)] == [True, True]
            write_keys(stage.folder / "keys.json", {"new": "n" * 40})

            async def stopped() -> bool:
                return not await opens(old)

            await eventually(stopped)
            assert await opens(new)


def settings_classes() -> list[type[ServiceSettings]]:
    names = [module.name for module in pkgutil.iter_modules(leyden.services.__path__)]
    return [importlib.import_module(f"leyden.services.{name}.settings").Settings for name in names]


@pytest.mark.parametrize("settings", settings_classes(), ids=lambda one: one.__module__.split(".")[2])
def test_everything_listens_on_loopback_by_default(settings: type[ServiceSettings]) -> None:
    # The hosts of the stores are no addresses of its own.
    own = [
        name for name in settings.model_fields if name.endswith("host") and name not in {"database_host", "redis_host"}
    ]
    hosts = [settings.model_fields[name].default for name in own]
    assert hosts
    assert all(ipaddress.ip_address(host).is_loopback for host in hosts)


@pytest.mark.parametrize("settings", settings_classes(), ids=lambda one: one.__module__.split(".")[2])
def test_settings_do_not_show_their_secrets(settings: type[ServiceSettings], tmp_path: Path) -> None:
    secret = {name for name in settings.model_fields if name.endswith(("_key", "_token"))}
    urls = {"database_url": "postgresql://leyden:hidden-1@127.0.0.1/x", "redis_url": "redis://:hidden-2@127.0.0.1/0"}
    required = {name: "any" for name, field in settings.model_fields.items() if field.is_required()}
    shown = settings(**{**required, **urls, **{name: f"hidden-{name}" for name in secret}})
    assert "hidden-" not in repr(shown) + str(shown)
    assert all(f"hidden-{name}" not in json.dumps(shown.model_dump(mode="json", include={name})) for name in secret)
