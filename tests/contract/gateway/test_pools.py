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
from leyden.libs.store.policies import policy_columns
from leyden.services.gateway.engine.pool import EnginePool
from leyden.services.gateway.prompt.template import ChatModel
from tests.fakes.chat_model import EOS, make_chat_model
from tests.fakes.gateway import Scene, scene
from tests.fakes.scripted_engine import ScriptedEngine, running
from tests.support import builders
from tests.support.long import long_only
from tests.support.waiting import eventually

HI: list[Any] = [{"role": "user", "content": "hi"}]
BARE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}[assistant]"


# 1e25 rounds of work in a conversation of two characters.
ENDLESS = "{% for a in range(9**5) %}" * 5 + "{% endfor %}" * 5 + BARE


async def add_run(stage: Scene, pool: str, **settings: Any) -> tables.Run:
    run = await builders.add_run(stage.database, config={**builders.run_document(), "pool": pool, **settings})
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
    calls = {call.run_id: call for call in await stage.calls() if call.status == "completed"}
    assert model.tokenizer.decode(np.frombuffer(calls[run.id].sampled_ids, "<i4").tolist()).startswith("Small.")


async def test_a_run_has_the_template_of_the_model_with_which_it_began(tmp_path: Path, database: Database) -> None:
    first = make_chat_model(tmp_path / "first", BARE)
    async with scene(tmp_path, database, says="Hello.") as stage:
        async with database.session() as session:
            session.add(tables.RunBase(run_id=stage.run_id, path=str(first)))
        async with stage.client() as agent:
            create: Any = agent.chat.completions.create
            await create(model="m", messages=HI)
    assert rendered(stage.engine, stage.model) == ["[user]hi[assistant]"]


@pytest.mark.parametrize("is_here", [True, False])
async def test_the_gateways_model_serves_a_run_whose_trainer_has_it_at_another_path(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch, is_here: bool
) -> None:
    async with scene(tmp_path, database, says="Hello.") as stage:
        elsewhere = tmp_path / "elsewhere"
        if is_here:
            elsewhere.symlink_to(stage.model.folder)
        async with database.session() as session:
            session.add(tables.RunBase(run_id=stage.run_id, path=str(elsewhere)))
        # It is read once, with its parsers.
        monkeypatch.setattr("leyden.services.gateway.prompt.models.ChatModel", None)
        async with stage.client() as agent:
            create: Any = agent.chat.completions.create
            await create(model="m", messages=HI)
    assert rendered(stage.engine, stage.model)[0].startswith("<|im_start|>user\nhi")


async def test_an_engine_that_drains_ends_its_calls_and_gets_no_new_one(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, released = asyncio.Event(), asyncio.Event()
    refresh, reads = EnginePool.refresh, 0

    async def counted(pool: EnginePool) -> None:
        nonlocal reads
        await refresh(pool)
        reads += 1

    monkeypatch.setattr(EnginePool, "refresh", counted)

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
            # The first of them may have begun before the change.
            before = reads
            await eventually(lambda: reads >= before + 2)
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


async def test_runs_that_share_an_engine_get_the_tokens_of_their_own_adapter(
    tmp_path: Path, database: Database
) -> None:
    def says(body: dict[str, Any]) -> list[int]:
        return [32 + len(body.get("lora_path", "")), EOS]

    # Without engines of the settings, calls wait until the gateway has read the rows below.
    async with scene(tmp_path, database, says=says, engine_urls=[]) as stage:
        engine, other = stage.engine, await add_run(stage, "default")
        engine.weight_version, engine.adapters = "default", {f"{other.id}:4": "/w/4"}
        async with database.session() as session:
            session.add(tables.Engine(url=engine.url, state="serving"))
            await session.flush()
            session.add(tables.EngineAdapter(url=engine.url, run_id=stage.run_id, policy_version=0))
            session.add(
                tables.EngineAdapter(url=engine.url, run_id=other.id, policy_version=4, adapter=f"{other.id}:4")
            )
        async with stage.client() as first, client(stage, other) as second:
            for agent in (first, second):
                create: Any = agent.chat.completions.create
                await create(model="m", messages=HI)
                async for _ in await create(
                    model="m", messages=[*HI, {"role": "user", "content": "again"}], stream=True
                ):
                    pass
    versions = {call.run_id: np.frombuffer(call.policy_versions, "<i4").tolist() for call in await stage.calls()}
    assert versions == {stage.run_id: [0, 0], other.id: [4, 4]}
    asked = [(request.get("lora_path"), request["extra_key"]) for request in engine.requests]
    assert asked == [(None, f"{stage.run_id}:0")] * 2 + [(f"{other.id}:4", f"{other.id}:4")] * 2


async def test_a_call_waits_while_its_engine_has_no_adapter_yet(tmp_path: Path, database: Database) -> None:
    async with scene(tmp_path, database, says="Hello.", engine_urls=[]) as stage:
        engine, name = stage.engine, f"{stage.run_id}:1"
        engine.weight_version = "default"
        async with database.session() as session:
            session.add(tables.Engine(url=engine.url, state="serving"))
            await session.flush()
            session.add(tables.EngineAdapter(url=engine.url, run_id=stage.run_id, policy_version=1, adapter=name))
        async with stage.client() as agent:
            create: Any = agent.chat.completions.create
            answering = asyncio.create_task(create(model="m", messages=HI))
            while not engine.requests:
                await asyncio.sleep(0.01)
            engine.adapters[name] = "/w/1"
            assert (await answering).choices[0].message.content == "Hello."
    [call] = await stage.calls()
    assert (call.min_policy_version, call.max_policy_version) == (1, 1)


async def test_each_role_gets_the_model_and_the_engines_of_its_policy(tmp_path: Path, database: Database) -> None:
    folder = make_chat_model(tmp_path / "second", BARE)
    model = ChatModel(folder)
    document = builders.run_document(
        roles=[
            {"name": "checker", "agent_name": "checker", "policy": "judge"},
            {"name": "oracle", "model": "gpt-*", "policy": "frozen"},
        ],
        policies={"judge": {"pool": "second"}, "frozen": {"pool": "second", "frozen": True}},
    )
    async with scene(tmp_path, database, says="Default.", run=document) as stage:
        judge, frozen = [
            await builders.add_run(
                database,
                config={**builders.run_document(), "pool": "second"},
                **policy_columns(stage.run_id, policy),
            )
            for policy in ("judge", "frozen")
        ]
        second = ScriptedEngine(
            lambda _: [*model.tokenizer.encode("Second.").tolist(), EOS], model.tokenizer.decode, f"{judge.id}:3"
        )
        third = ScriptedEngine(
            lambda _: [*model.tokenizer.encode("Third.").tolist(), EOS], model.tokenizer.decode, f"{frozen.id}:0"
        )
        async with running(second), running(third), stage.client() as agent:
            engines = [
                (stage.engine.url, "default", stage.run_id, 0),
                (second.url, "second", judge.id, 3),
                (third.url, "second", frozen.id, 0),
            ]
            async with database.session() as session:
                await write_pools(session, [Pool("default"), Pool("second", str(folder))])
                session.add_all(
                    tables.Engine(url=url, pool=pool, state="serving", run_id=run_id, policy_version=version)
                    for url, pool, run_id, version in engines
                )
            create: Any = agent.chat.completions.create
            said: list[str] = []
            for name, headers in (("m", {}), ("m", {"x-agent-name": "checker"}), ("gpt-5", {})):
                answer = await create(model=name, messages=HI, extra_headers=headers)
                said.append(answer.choices[0].message.content)
            # A conversation of one policy goes on with its own tokens, also after another policy had the same text.
            turns = [*HI, {"role": "assistant", "content": "Second."}, {"role": "user", "content": "more"}]
            await create(model="m", messages=turns, extra_headers={"x-agent-name": "checker"})
    assert said == ["Default.", "Second.", "Third."]
    assert rendered(second, model) == ["[user]hi[assistant]", "[user]hi[assistant]Second.[user]more[assistant]"]
    calls = await stage.calls()
    assert [(call.run_id, call.role, call.min_policy_version) for call in calls] == [
        (stage.run_id, None, 0),
        (stage.run_id, "checker", 3),
        (stage.run_id, "oracle", 0),
        (stage.run_id, "checker", 3),
    ]
    assert [call.untrainable_reason for call in calls] == [None, None, "the policy of role oracle does not train", None]
    assert calls[3].parent_call_id == calls[1].id


def speaks(run: tables.Run, model: ChatModel, text: str) -> ScriptedEngine:
    return ScriptedEngine(
        lambda _: [*model.tokenizer.encode(text).tolist(), EOS], model.tokenizer.decode, f"{run.id}:0"
    )


async def serve(stage: Scene, *engines: tuple[ScriptedEngine, str]) -> None:
    async with stage.database.session() as session:
        session.add_all(
            tables.Engine(url=engine.url, pool="default", state="serving", run_id=run_id, policy_version=0)
            for engine, run_id in engines
        )


async def test_runs_of_one_pool_have_the_template_and_the_tokenizer_of_their_own_models(
    tmp_path: Path, database: Database
) -> None:
    folder = make_chat_model(tmp_path / "tuned", BARE)
    own = ChatModel(folder)
    async with scene(tmp_path, database, says="Base.") as stage:
        run = await add_run(stage, "default", model=str(folder))
        tuned = speaks(run, own, "Tuned.")
        async with running(tuned), stage.client() as first, client(stage, run) as second:
            await serve(stage, (stage.engine, stage.run_id), (tuned, run.id))
            create: Any = first.chat.completions.create, second.chat.completions.create
            answers = [await ask(model="m", messages=HI) for ask in create]
            names = [[one.id async for one in agent.models.list()] for agent in (first, second)]
    assert [answer.choices[0].message.content for answer in answers] == ["Base.", "Tuned."]
    assert names == [["model"], ["tuned"]]
    assert rendered(stage.engine, stage.model) == ["<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"]
    assert rendered(tuned, own) == ["[user]hi[assistant]"]


@long_only
async def test_a_template_that_never_ends_gets_an_error_and_stops_no_other_run(
    tmp_path: Path, database: Database
) -> None:
    folder = make_chat_model(tmp_path / "endless", ENDLESS)
    async with scene(tmp_path, database, says="Base.", render_seconds=1.0) as stage:
        run = await add_run(stage, "default", model=str(folder))
        async with stage.client() as first, client(stage, run) as second:
            await serve(stage, (stage.engine, stage.run_id))
            create: Any = first.chat.completions.create, second.chat.completions.create
            await create[0](model="m", messages=HI)
            slow = [asyncio.create_task(create[1](model="m", messages=HI)) for _ in range(4)]
            answered = 0
            while not any(one.done() for one in slow):
                answer = await create[0](model="m", messages=[{"role": "user", "content": str(answered)}])
                assert answer.choices[0].message.content == "Base."
                answered += 1
            assert answered > 5
            for one in slow:
                with pytest.raises(openai.BadRequestError, match="more than 1 s of CPU time") as caught:
                    await one
                assert caught.value.code == "template_timeout"
