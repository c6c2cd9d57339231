"""The gateway in front of a real engine: the same tokens on both sides, through aborts and weight changes."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from leyden.libs.store import tables
from leyden.libs.store.database import Database
from tests.fakes.engine_client import KEY, EngineClient
from tests.fakes.gateway import GatewayUnderTest, all_calls, running_gateway
from tests.support import builders
from tests.support.waiting import eventually

HI: list[Any] = [{"role": "user", "content": "hi"}]
END_OF_TURN = 258


def ids(data: bytes) -> list[int]:
    return np.frombuffer(data, "<i4").tolist()


@dataclass
class Pair:
    """A gateway in front of an engine, with four rollouts of a run."""

    run_id: str
    gateway: GatewayUnderTest
    engine: EngineClient
    database: Database

    @property
    def rollout_id(self) -> str:
        return f"{self.run_id}.0.0"

    async def calls(self) -> list[tables.ModelCall]:
        return list(await all_calls(self.database))

    async def control(self, path: str, **body: Any) -> None:
        (await self.engine.control(path, **body)).raise_for_status()

    async def load(self, folder: Path, version: int) -> None:
        """Serves a folder's weights as this version of the run."""
        label = f"{self.run_id}:{version}"
        await self.control("/update_weights_from_disk", model_path=str(folder), weight_version=label)


@pytest.fixture
async def both(
    platform_engine: EngineClient, tmp_path: Path, database: Database, tiny_model: Path
) -> AsyncIterator[Pair]:
    run = await builders.add_run(database)
    _, rollouts = await builders.add_group(database, run, size=4)
    for rollout in rollouts:
        await builders.add_attempt(database, rollout)
    options: dict[str, Any] = {"engine_urls": [str(platform_engine.http.base_url)], "engine_api_key": KEY}
    # The engine needs longer for the longest answer here, on a fast machine, too.
    options["abandoned_seconds"] = 0.5
    async with running_gateway(
        tmp_path, model_path=tiny_model, database_url=database.dsn, run_id=run.id, **options
    ) as gateway:
        pair = Pair(run.id, gateway, platform_engine, database)
        await pair.load(tiny_model, 0)
        yield pair


@pytest.mark.parametrize("stream", [False, True])
async def test_conversations_of_siblings_are_answered_and_continue_their_tokens(both, stream):
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


# SGLang ignores seeds unless it is started for deterministic answers, which needs a GPU.
@pytest.mark.parametrize("platform_engine", ["stand-in"], indirect=True)
async def test_seeds_repeat_and_choices_differ(both):
    async with both.gateway.client(both.rollout_id) as client:
        create: Any = client.chat.completions.create
        answers = [await create(model="m", messages=HI, n=3, seed=5, max_tokens=12) for _ in range(2)]
        texts = [[choice.message.content for choice in answer.choices] for answer in answers]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3


async def test_penalties_stops_and_log_probabilities_are_understood_by_the_engine(both):
    async with both.gateway.client(both.rollout_id) as client:
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


@pytest.mark.parametrize("mode", ["abort", "retract"])
async def test_tokens_record_a_weight_change_in_the_middle_and_the_agent_never_notices(
    both, tiny_model, new_weights, mode
):
    async with both.gateway.client(both.rollout_id) as client:
        create: Any = client.chat.completions.create
        # No end of turn, so that no answer ends early.
        bias = {str(END_OF_TURN): -100}
        stream = await create(model="m", messages=HI, max_tokens=300, stream=True, logit_bias=bias)
        shown = [await anext(stream)]
        await both.control("/pause_generation", mode=mode)
        await both.load(new_weights, 1)
        await both.control("/continue_generation")
        shown += [chunk async for chunk in stream]
        (call,) = await both.calls()
    versions = ids(call.policy_versions)
    assert (call.min_policy_version, call.max_policy_version) == (0, 1)
    assert versions == sorted(versions)
    assert (call.completion_tokens, call.finish_reason, call.status) == (300, "length", "completed")
    assert shown[-1].choices[0].finish_reason == "length"
    # Each token's log-probability is that of the version on record, so that the boundary is at the right token.
    by_version = [scored(weights, call) for weights in (tiny_model, new_weights)]
    expected = [by_version[version][place] for place, version in enumerate(versions)]
    assert np.frombuffer(call.generator_logprobs, "<f4").tolist() == pytest.approx(expected, abs=1e-3)


def scored(weights: Path, call: tables.ModelCall) -> list[float]:
    """Log-probabilities of what was sampled, by a plain forward pass."""
    prompt, sampled = ids(call.prompt_ids), ids(call.sampled_ids)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(weights)(torch.tensor([prompt + sampled])).logits[0]
    logits[:, END_OF_TURN] -= 100
    rows = logits.log_softmax(-1)[len(prompt) - 1 :]
    return [float(row[token]) for row, token in zip(rows, sampled, strict=False)]


async def test_a_hang_up_frees_the_engine(both):
    async with both.gateway.client(both.rollout_id) as client:
        create: Any = client.chat.completions.create
        asking = asyncio.create_task(create(model="m", messages=HI, max_tokens=3500, logit_bias={"40": 100}))
        await both.engine.reach(running=1, waiting=0)
        asking.cancel()
        await asyncio.wait({asking})
    await both.engine.reach(running=0, waiting=0)
    calls = await eventually(lambda: both.calls())
    assert [call.status for call in calls] == ["aborted"]
    assert calls[0].completion_tokens < 3500


async def test_an_engine_with_a_shorter_context_than_the_model_answers(both, tmp_path, database, tiny_model):
    """The gateway's copy of the model allows 8192 tokens, the engine 4096."""
    larger = copy_of(tiny_model, tmp_path / "larger", max_position_embeddings=8192)
    options = {"engine_urls": [str(both.engine.http.base_url)], "engine_api_key": KEY}
    options |= {"model_path": larger, "database_url": database.dsn, "run_id": both.run_id}
    async with running_gateway(tmp_path, **options) as gateway, gateway.client(both.rollout_id) as client:
        stop = {"stop": ["I"], "logit_bias": {"40": 100}}
        answer = await client.chat.completions.create(model="m", messages=HI, **stop)
    assert answer.choices[0].finish_reason == "stop"


def copy_of(model: Path, folder: Path, **changes: Any) -> Path:
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder
