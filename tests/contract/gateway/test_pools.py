"""Two pools behind one gateway: each run has the template, the limits and the engines of its own pool."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.engines import Pool, write_pools
from leyden.services.gateway.prompt.template import ChatModel
from tests import builders
from tests.fakes.chat_model import EOS, make_chat_model
from tests.fakes.gateway import Scene, scene
from tests.fakes.scripted_engine import ScriptedEngine, running

HI: list[Any] = [{"role": "user", "content": "hi"}]
BARE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}[assistant]"


async def add_run(stage: Scene, pool: str) -> tables.Run:
    run = await builders.add_run(stage.database, config={**builders.run_document(), "pool": pool})
    _, [rollout, _] = await builders.add_group(stage.database, run)
    await builders.add_attempt(stage.database, rollout)
    return run


def client(stage: Scene, run: tables.Run) -> openai.AsyncOpenAI:
    return replace(stage.gateway, run_id=run.id).client(f"{run.id}.0.0")


def rendered(engine: ScriptedEngine, model: ChatModel) -> list[str]:
    return [model.tokenizer.decode(request["input_ids"]) for request in engine.requests]


async def test_each_run_has_the_template_the_limits_and_the_engines_of_its_pool(
    tmp_path: Path, database: Database
) -> None:
    folder = make_chat_model(tmp_path / "small", BARE)
    model = ChatModel(folder)
    async with scene(tmp_path, database, says="Default.") as stage:
        async with database.session() as session:
            await write_pools(session, [Pool("default"), Pool("small", str(folder), 64)])
        run = await add_run(stage, "small")
        small = ScriptedEngine(
            lambda _: [*model.tokenizer.encode("Small.").tolist(), EOS], model.tokenizer.decode, f"{run.id}:0"
        )
        async with running(small), stage.client() as first, client(stage, run) as second:
            engines = [(stage.engine.url, "default", stage.run_id), (small.url, "small", run.id)]
            async with database.session() as session:
                session.add_all(
                    tables.Engine(url=url, pool=pool, state="serving", run_id=run_id, policy_version=0)
                    for url, pool, run_id in engines
                )
            create: Any = first.chat.completions.create, second.chat.completions.create
            answers = [await ask(model="m", messages=HI) for ask in create]
            streamed = await create[1](model="m", messages=[*HI, {"role": "user", "content": "again"}], stream=True)
            text = "".join([choice.delta.content or "" async for chunk in streamed for choice in chunk.choices])
            assert [answer.choices[0].message.content for answer in answers] == ["Default.", "Small."]
            assert text == "Small."
            names = [[one.id async for one in agent.models.list()] for agent in (first, second)]
            assert names == [["model"], ["small"]]
            with pytest.raises(openai.BadRequestError, match="64"):
                await create[1](model="m", messages=[{"role": "user", "content": "x" * 100}])
            await create[0](model="m", messages=[{"role": "user", "content": "x" * 100}])
    assert rendered(stage.engine, stage.model)[0].startswith("<|im_start|>user\nhi")
    assert rendered(small, model) == ["[user]hi[assistant]", "[user]hi[user]again[assistant]"]
    calls = {call.run_id: call for call in await stage.calls()}
    assert model.tokenizer.decode(np.frombuffer(calls[run.id].sampled_ids, "<i4").tolist()).startswith("Small.")


async def test_an_engine_that_drains_ends_its_calls_and_gets_no_new_one(tmp_path: Path, database: Database) -> None:
    reached, released = asyncio.Event(), asyncio.Event()

    async def pace(sampled: int) -> None:
        if sampled:
            reached.set()
            await released.wait()

    async with scene(tmp_path, database, says="Drained.", engine={"pace": pace}) as stage, stage.client() as agent:
        draining = tables.Engine(url=stage.engine.url, state="serving", run_id=stage.run_id, policy_version=0)
        async with database.session() as session:
            session.add(draining)
        create: Any = agent.chat.completions.create
        in_flight = asyncio.create_task(create(model="m", messages=HI))
        await reached.wait()
        other = ScriptedEngine(
            lambda _: [*stage.model.tokenizer.encode("Next.").tolist(), EOS],
            stage.model.tokenizer.decode,
            f"{stage.run_id}:0",
        )
        async with running(other):
            async with database.session() as session:
                (await session.get_one(tables.Engine, stage.engine.url)).state = "draining"
                session.add(tables.Engine(url=other.url, state="serving", run_id=stage.run_id, policy_version=0))
            await asyncio.sleep(0.2)
            later = [await create(model="m", messages=[{"role": "user", "content": str(n)}]) for n in range(3)]
            assert [answer.choices[0].message.content for answer in later] == ["Next."] * 3
            released.set()
            assert (await in_flight).choices[0].message.content == "Drained."
        assert (len(stage.engine.requests), len(other.requests)) == (1, 3)


async def test_a_model_that_cannot_be_read_fails_the_calls_of_its_pool_alone_until_it_can(
    tmp_path: Path, database: Database
) -> None:
    async with scene(tmp_path, database) as stage:
        async with database.session() as session:
            await write_pools(session, [Pool("default"), Pool("small", str(tmp_path / "small"))])
        run, gone = await add_run(stage, "small"), await add_run(stage, "gone")
        async with stage.client() as first, client(stage, run) as second, client(stage, gone) as third:
            with pytest.raises(openai.InternalServerError, match="cannot read the model of pool small"):
                await second.chat.completions.create(model="m", messages=HI)
            with pytest.raises(openai.InternalServerError, match="no longer exists"):
                await third.chat.completions.create(model="m", messages=HI)
            await first.chat.completions.create(model="m", messages=HI)
            shutil.copytree(stage.folder / "model", tmp_path / "small")
            assert [one.id async for one in second.models.list()] == ["small"]
