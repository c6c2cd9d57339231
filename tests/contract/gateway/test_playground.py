"""The gateway's door for people: an answer of the policy, without a record, and never more than a few at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select

from leyden.libs.contracts.capability import PLAYGROUND, Scope
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.services.gateway import playground
from tests.fakes.gateway import Scene, scene
from tests.support import builders
from tests.support.waiting import eventually

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "Hi?"}], "max_tokens": 40, "temperature": 0.5}


@pytest.fixture
async def stage(tmp_path: Path, database: Database) -> AsyncIterator[Scene]:
    async with scene(tmp_path, database, says="Hello there.") as made:
        yield made


def ask(stage: Scene, **changes: Any) -> dict[str, Any]:
    key = stage.gateway.key(PLAYGROUND, 0, scope=Scope.PLAYGROUND)
    headers = {"authorization": f"Bearer {key}"}
    return {"url": f"{stage.gateway.url}/playground", "json": {**CHAT, **changes}, "headers": headers}


def events(text: str) -> list[tuple[str, Any]]:
    """Names and data of server-sent events."""
    pairs = [block.split("\n") for block in text.split("\n\n") if block]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in pairs]


async def test_an_answer_streams_with_tokens_and_their_version_and_leaves_no_row(
    stage: Scene, database: Database
) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        answer = await client.post(**ask(stage))
    assert answer.status_code == 200, answer.text
    *pieces, (name, end) = events(answer.text)
    assert {name for name, _ in pieces} == {"tokens"}
    assert "".join(piece["content"] for _, piece in pieces) == "Hello there."
    tokens = [token for _, piece in pieces for token in piece["tokens"]]
    assert (name, end["finish_reason"], end["completion_tokens"]) == ("end", "stop", len(tokens))
    assert {token["version"] for token in tokens} == {0}
    assert all(token["logprob"] <= 0 for token in tokens)
    sent = stage.engine.requests[-1]
    assert sent["sampling_params"]["temperature"] == 0.5
    async with database.read() as session:
        counts = [
            await session.scalar(select(func.count()).select_from(table))
            for table in (tables.ModelCall, tables.Delivery)
        ]
    assert counts == [0, 0]


async def test_another_version_than_the_asked_one_never_answers(stage: Scene) -> None:
    def asked(version: int) -> dict[str, Any]:
        return {**ask(stage), "params": {"version": version}}

    async with httpx.AsyncClient(timeout=60) as client:
        assert events((await client.post(**asked(0))).text)[-1][0] == "end"
        refused = await client.post(**asked(1))
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "version_not_served")
        assert "serves version 0 now, not 1" in refused.json()["error"]["message"]

        for version in (0, 1):
            await builders.add_policy_version(stage.database, await stage_run(stage), version)
        goes_on, text = asyncio.Event(), ""

        async def change(count: int) -> None:
            if count == 4:
                await goes_on.wait()
                stage.engine.weight_version = f"{stage.run_id}:1"

        stage.engine.weight_version = f"{stage.run_id}:0"
        stage.engine.pace, stage.engine.tokens_per_chunk = change, 1
        async with client.stream("POST", **asked(0)) as answer:
            async for piece in answer.aiter_text():
                text += piece
                goes_on.set()
        *pieces, (name, error) = events(text)
    assert (name, error["error"]["code"]) == ("error", "version_not_served")
    assert {token["version"] for _, shown in pieces for token in shown["tokens"]} == {0}


async def stage_run(stage: Scene) -> tables.Run:
    async with stage.database.read() as session:
        return await session.get_one(tables.Run, stage.run_id)


async def test_keys_of_attempts_do_not_open_it_and_its_key_opens_nothing_else(stage: Scene) -> None:
    asked = ask(stage)
    attempts = stage.gateway.key(stage.rollout_id, more_scopes=Scope)
    async with httpx.AsyncClient(timeout=60) as client:
        refused = await client.post(**{**asked, "headers": {"authorization": f"Bearer {attempts}"}})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "wrong_rollout")
        for url in (f"{stage.gateway.url}/v1/chat/completions", f"{stage.gateway.base_url(PLAYGROUND, 0)}/responses"):
            refused = await client.post(**{**asked, "url": url})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "wrong_scope"), url
    assert stage.engine.requests == []


async def test_a_person_more_than_it_takes_is_refused_while_an_attempt_is_answered(
    stage: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(playground, "MAX_CALLS", 1)
    goes_on = asyncio.Event()
    stage.engine.pace = lambda _: goes_on.wait()
    async with httpx.AsyncClient(timeout=60) as client:
        first = asyncio.create_task(client.post(**ask(stage)))
        await eventually(lambda: stage.engine.requests, "the first question reaches the engine")
        refused = await client.post(**ask(stage))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
        assert "rollouts come first" in refused.json()["error"]["message"]
        stage.engine.pace = None
        async with stage.client() as agent:
            said = await agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi?"}])
        assert said.choices[0].message.content == "Hello there."
        goes_on.set()
        assert (await first).status_code == 200
        assert (await client.post(**ask(stage))).status_code == 200


async def test_a_person_who_leaves_frees_the_engine(stage: Scene) -> None:
    goes_on = asyncio.Event()

    async def pace(count: int) -> None:
        if count:
            await goes_on.wait()

    stage.engine.pace = pace
    async with httpx.AsyncClient(timeout=60) as client, client.stream("POST", **ask(stage)) as answer:
        await anext(answer.aiter_lines())
    await eventually(lambda: stage.engine.aborted, "the engine is told to stop")
    goes_on.set()


async def test_without_an_engine_the_refusal_says_so(stage: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playground, "FIRST_TOKEN_SECONDS", 0.2)
    stage.engine.weight_version = "run-other:3"
    async with httpx.AsyncClient(timeout=60) as client:
        refused = await client.post(**ask(stage))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
        assert stage.engine.url not in refused.text
        refused = await client.post(**ask(stage, messages=[{"role": "user", "content": "x " * 5000}]))
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
