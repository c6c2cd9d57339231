"""The playground's route: a person's question reaches the engine, and what refuses it says what to do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from leyden.libs.contracts.states import EngineState
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.engines import EngineStatus, write_engines
from leyden.services.api.app import create_app
from leyden.services.api.settings import Settings
from tests.contract.api.test_access import token
from tests.fakes.gateway import Scene, scene
from tests.support import builders
from tests.support.waiting import eventually


@pytest.fixture
async def stage(tmp_path: Path, database: Database) -> AsyncIterator[Scene]:
    async with scene(tmp_path, database, says="Hello there.") as made:
        yield made


@pytest.fixture
async def http(stage: Scene, redis_url: str) -> AsyncIterator[httpx.AsyncClient]:
    settings = Settings(
        database_url=stage.database.dsn,
        redis_url=redis_url,
        admin_token="a" * 32,
        capability_keys_file=stage.folder / "keys.json",
        gateway_url=stage.gateway.url,
        collector_url=stage.gateway.url,
    )
    app = create_app(settings)
    headers = {"authorization": f"Bearer {'a' * 32}"}
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://api", headers=headers, timeout=60) as client:
            yield client


async def ask(http: httpx.AsyncClient, run_id: str, headers: dict[str, str] | None = None, **asked: Any) -> Any:
    question = {"system": "Be brief.", "user": "Hi?", **asked}
    return await http.post(f"/v1/runs/{run_id}/playground", json=question, headers=headers)


async def test_a_question_is_answered_and_recorded_nowhere(stage: Scene, http: httpx.AsyncClient) -> None:
    answer = await ask(http, stage.run_id, max_tokens=90, temperature=0.25)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    data = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert "".join(piece.get("content", "") for piece in data) == "Hello there."
    assert data[-1]["finish_reason"] == "stop"
    sampling = stage.engine.requests[-1]["sampling_params"]
    assert (sampling["max_new_tokens"], sampling["temperature"]) == (90, 0.25)
    assert await stage.calls() == []
    assert stage.engine.url not in answer.text


async def test_a_token_has_one_question_at_a_time_and_another_token_its_own(
    stage: Scene, http: httpx.AsyncClient
) -> None:
    goes_on = asyncio.Event()
    stage.engine.pace = lambda _: goes_on.wait()
    other = {"authorization": (await token(http, "write"))["authorization"]}
    first = asyncio.create_task(ask(http, stage.run_id))
    await eventually(lambda: len(stage.engine.requests) == 1, "the first question reaches the engine")
    refused = await ask(http, stage.run_id)
    assert (refused.status_code, refused.json()["cause"]) == (429, "busy")
    second = asyncio.create_task(ask(http, stage.run_id, other))
    await eventually(lambda: len(stage.engine.requests) == 2, "another token's question does, too")
    third = await ask(http, stage.run_id, {"authorization": (await token(http, "write"))["authorization"]})
    assert (third.status_code, third.json()["cause"], third.headers["retry-after"]) == (429, "rate_limit_exceeded", "5")
    goes_on.set()
    assert [(await one).status_code for one in (first, second)] == [200, 200]
    assert (await ask(http, stage.run_id)).status_code == 200


@pytest.mark.parametrize(("phase", "remedy"), [("running", "the page Platform"), ("completed", "leyden policy export")])
async def test_a_run_that_no_engine_serves_is_refused_with_the_remedy(
    stage: Scene, http: httpx.AsyncClient, phase: str, remedy: str
) -> None:
    run = await builders.add_run(stage.database)
    if phase != "running":
        await builders.end_run(stage.database, run, phase)
    async with stage.database.session() as session:
        await write_engines(session, [EngineStatus(stage.engine.url, EngineState.SERVING, stage.run_id, 0)])
    refused = await ask(http, run.id)
    assert (refused.status_code, refused.json()["cause"]) == (503, "not_served")
    assert remedy in refused.json()["detail"]
    assert (await ask(http, stage.run_id)).status_code == 200


async def test_tools_and_a_seed_reach_the_model_and_the_engine(stage: Scene, http: httpx.AsyncClient) -> None:
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
    assert (await ask(http, stage.run_id)).status_code == 200
    assert (await ask(http, stage.run_id, tools=[tool], seed=7)).status_code == 200
    plain, with_tool = stage.engine.requests[-2:]
    assert with_tool["sampling_params"]["sampling_seed"] == 7 != plain["sampling_params"]["sampling_seed"]
    words = [stage.model.tokenizer.decode(one["input_ids"]) for one in (plain, with_tool)]
    assert ["look_up" in one for one in words] == [False, True]
    assert (await ask(http, stage.run_id, tools=[{"type": "function"}])).status_code == 400


async def test_a_version_that_no_engine_serves_is_refused_with_the_remedy_and_never_answered(
    stage: Scene, http: httpx.AsyncClient
) -> None:
    async with stage.database.read() as session:
        run = await session.get_one(tables.Run, stage.run_id)
    for version in range(3):
        await builders.add_policy_version(stage.database, run, version)
    async with stage.database.session() as session:
        await write_engines(session, [EngineStatus(stage.engine.url, EngineState.SERVING, stage.run_id, 0)])
    refused = await ask(http, stage.run_id, version=2)
    assert (refused.status_code, refused.json()["cause"]) == (409, "version_not_served")
    assert f"engines serve version 0 of run {stage.run_id}" in refused.json()["detail"]
    assert f"leyden policy export {stage.run_id} --version 2 --to FOLDER" in refused.json()["detail"]
    unknown = await ask(http, stage.run_id, version=3)
    assert (unknown.status_code, unknown.json()["detail"]) == (
        404,
        f"run {stage.run_id} has no version 3: its newest is 2",
    )
    assert stage.engine.requests == []
    assert (await ask(http, stage.run_id, version=0)).status_code == 200


async def test_what_the_gateway_refuses_reaches_the_person(stage: Scene, http: httpx.AsyncClient) -> None:
    refused = await ask(http, stage.run_id, user="x " * 5000)
    assert (refused.status_code, refused.json()["cause"]) == (400, "context_length_exceeded")
    assert (await ask(http, stage.run_id, user="")).status_code == 422
    assert (await ask(http, stage.run_id, max_tokens=100_000)).status_code == 422
    assert (await ask(http, "run-none")).status_code == 404


async def test_without_a_gateway_the_refusal_names_what_to_do(api_http: httpx.AsyncClient, database: Database) -> None:
    run = await builders.add_run(database)
    refused = await ask(api_http, run.id)
    assert (refused.status_code, refused.json()["cause"]) == (409, "not_configured")
    assert "API_GATEWAY_URL" in refused.json()["detail"]
