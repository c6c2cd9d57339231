"""The gateway in front of the real CPU engine: the same tokens on both sides, through aborts and weight changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from leyden.libs.service import serving
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.services.engine.app import create_engine_app
from leyden.services.engine.settings import Settings as EngineSettings
from tests import builders
from tests.fakes.gateway import GatewayUnderTest, all_calls, running_gateway

HI: list[Any] = [{"role": "user", "content": "hi"}]


def ids(data: bytes) -> list[int]:
    return np.frombuffer(data, "<i4").tolist()


@dataclass
class Pair:
    run_id: str
    gateway: GatewayUnderTest
    engine_url: str
    database: Database
    model_path: Path

    @property
    def rollout_id(self) -> str:
        return f"{self.run_id}.0.0"

    async def calls(self) -> list[tables.ModelCall]:
        return list(await all_calls(self.database))

    async def tell_engine(self, path: str, **body: Any) -> Any:
        async with httpx.AsyncClient(timeout=60) as http:
            return (await http.post(f"{self.engine_url}{path}", json=body)).raise_for_status()

    async def is_at_work(self) -> None:
        """Returns when the engine has something in flight."""
        async with asyncio.timeout(60), httpx.AsyncClient(timeout=60) as http:
            while not (await http.get(f"{self.engine_url}/v1/loads")).json()["loads"][0]["num_used_tokens"]:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def pair(folder: Path, database: Database, model_path: Path) -> AsyncIterator[Pair]:
    run = await builders.add_run(database)
    _, rollouts = await builders.add_group(database, run, size=4)
    for rollout in rollouts:
        await builders.add_attempt(database, rollout)
    settings = EngineSettings(model_path=model_path, weight_version=f"{run.id}:0", threads=1)
    async with serving(create_engine_app(settings), shutdown_seconds=2) as port:
        url = f"http://127.0.0.1:{port}"
        async with running_gateway(
            folder, model_path=model_path, database_url=database.dsn, run_id=run.id, engine_urls=[url]
        ) as gateway:
            yield Pair(run.id, gateway, url, database, model_path)


@pytest.mark.parametrize("stream", [False, True])
async def test_conversations_of_siblings_are_answered_and_continue_their_tokens(tmp_path, database, tiny_model, stream):
    async with pair(tmp_path, database, tiny_model) as both:

        async def converse(sibling: int) -> None:
            messages: list[Any] = [*HI]
            async with both.gateway.client(f"{both.run_id}.0.{sibling}") as client:
                create: Any = client.chat.completions.create
                for _ in range(3):
                    answer = await create(model="m", messages=messages, max_tokens=12, stream=stream)
                    text = await _text(answer) if stream else answer.choices[0].message.content
                    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]

        await asyncio.gather(*(converse(sibling) for sibling in range(4)))
        calls = await both.calls()
    assert len(calls) == 12
    for sibling in range(4):
        turns = [call for call in calls if call.rollout_id.endswith(f".{sibling}")]
        for earlier, later in pairwise(turns):
            before = ids(earlier.prompt_ids) + ids(earlier.sampled_ids)
            assert ids(later.prompt_ids)[: len(before)] == before
    assert all(call.trainable and len(call.generator_logprobs) == 4 * call.completion_tokens for call in calls)
    assert {version for call in calls for version in ids(call.policy_versions)} == {0}


async def _text(stream: Any) -> str:
    return "".join([choice.delta.content or "" async for chunk in stream for choice in chunk.choices])


async def test_seeds_repeat_and_choices_differ(tmp_path, database, tiny_model):
    async with pair(tmp_path, database, tiny_model) as both, both.gateway.client(both.rollout_id) as client:
        create: Any = client.chat.completions.create
        answers = [await create(model="m", messages=HI, n=3, seed=5, max_tokens=12) for _ in range(2)]
        texts = [[choice.message.content for choice in answer.choices] for answer in answers]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3


async def test_penalties_stops_and_log_probabilities_are_understood_by_the_engine(tmp_path, database, tiny_model):
    async with pair(tmp_path, database, tiny_model) as both, both.gateway.client(both.rollout_id) as client:
        answer = await client.chat.completions.create(
            model="m",
            messages=HI,
            max_tokens=8,
            temperature=0.9,
            top_p=0.95,
            frequency_penalty=0.5,
            presence_penalty=0.1,
            logit_bias={"5": 1},
            stop=["zz", "yy"],
            logprobs=True,
            top_logprobs=3,
            extra_body={"top_k": 50, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 2},
        )
        (call,) = await both.calls()
    content = answer.choices[0].logprobs.content if answer.choices[0].logprobs else None
    assert content is not None
    assert [len(entry.top_logprobs) for entry in content] == [3] * call.completion_tokens
    assert not call.trainable


async def test_tokens_record_a_weight_change_in_the_middle_and_the_agent_never_notices(tmp_path, database, tiny_model):
    async with pair(tmp_path, database, tiny_model) as both, both.gateway.client(both.rollout_id) as client:
        create: Any = client.chat.completions.create
        # A bias towards one letter keeps the answer from ending early.
        stream = await create(model="m", messages=HI, max_tokens=1000, stream=True, logit_bias={"40": 100})
        shown = [await anext(stream)]
        await both.tell_engine("/pause_generation", mode="abort")
        await both.tell_engine(
            "/update_weights_from_disk", model_path=str(tiny_model), weight_version=f"{both.run_id}:1"
        )
        await both.tell_engine("/continue_generation")
        shown += [chunk async for chunk in stream]
        (call,) = await both.calls()
    versions = ids(call.policy_versions)
    assert (call.min_policy_version, call.max_policy_version) == (0, 1)
    assert versions == sorted(versions)
    assert (call.completion_tokens, call.finish_reason, call.status) == (1000, "length", "completed")
    assert shown[-1].choices[0].finish_reason == "length"


async def test_a_hang_up_frees_the_engine(tmp_path, database, tiny_model):
    async with pair(tmp_path, database, tiny_model) as both:
        async with both.gateway.client(both.rollout_id) as client:
            create: Any = client.chat.completions.create
            asking = asyncio.create_task(create(model="m", messages=HI, max_tokens=3500, logit_bias={"40": 100}))
            await both.is_at_work()
            asking.cancel()
            await asyncio.wait({asking})
        async with asyncio.timeout(60):
            while not (calls := await both.calls()):
                await asyncio.sleep(0.05)
    assert [call.status for call in calls] == ["aborted"]
    assert calls[0].completion_tokens < 3500
