"""The engine as a process, killed in the middle of a weight update beside streams: no stream loses its answer."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from leyden.libs.contracts.weights import weights_sha256
from leyden.libs.faults import FaultInjector
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.services.controller.engines.targets import TargetVersion
from tests.contract.controller.test_engines import fleet_of
from tests.contract.gateway.test_process import free_port
from tests.fakes.gateway import GatewayUnderTest, all_calls, running_gateway
from tests.support import builders
from tests.support.long import long_only
from tests.support.tiny_model import make_tiny_model
from tests.support.waiting import eventually

POINTS = ("engine.weights_read", "engine.weights_swapped")
STREAMS, TOKENS, TOKENS_BEFORE = 3, 1500, 500
END_OF_TURN = 258
BIAS = -100.0
"""Keeps answers from ending early."""


@asynccontextmanager
async def engine_process(model: Path, port: int, injector: FaultInjector) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "leyden.services.engine"),
        cwd=Path(__file__).parents[3],
        env={
            "PATH": os.environ["PATH"],
            "LEYDEN_LOG_LEVEL": "warning",
            "ENGINE_MODEL_PATH": str(model),
            "ENGINE_PORT": str(port),
            "ENGINE_THREADS": "1",
            "ENGINE_MAX_TOTAL_TOKENS": "16384",
            **injector.environment,
        },
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def came_true(condition: Callable[[], bool]) -> None:
    await eventually(lambda: condition())


async def holds(url: str, tokens: int) -> None:
    """Returns when the engine has so many tokens in flight."""
    async with asyncio.timeout(120), httpx.AsyncClient(timeout=60) as http:
        while (await http.get(f"{url}/v1/loads")).json()["loads"][0]["num_used_tokens"] < tokens:
            await asyncio.sleep(0.01)


class Agent:
    """Reads one long stream."""

    def __init__(self, gateway: GatewayUnderTest, rollout_id: str) -> None:
        self._gateway, self._rollout_id = gateway, rollout_id
        self.has_begun = False
        self.finish: str | None = None

    async def ask(self) -> None:
        async with self._gateway.client(self._rollout_id, timeout=120) as client:
            create: Any = client.chat.completions.create
            messages = [{"role": "user", "content": f"I am {self._rollout_id}. " * 4}]
            bias = {str(END_OF_TURN): BIAS}
            async for chunk in await create(
                model="m", messages=messages, max_tokens=TOKENS, stream=True, logit_bias=bias
            ):
                self.has_begun = True
                self.finish = chunk.choices[0].finish_reason


@pytest.mark.parametrize("point", [POINTS[0], *(pytest.param(point, marks=long_only) for point in POINTS[1:])])
async def test_an_engine_killed_in_a_weight_update_costs_no_answer_and_no_label(
    database: Database, redis_url: str, tiny_model: Path, tmp_path: Path, point: str
) -> None:
    weights = [tiny_model, make_tiny_model(tmp_path / "new", seed=1)]
    run = await builders.add_run(database)
    _, rollouts = await builders.add_group(database, run, size=STREAMS)
    for rollout in rollouts:
        await builders.add_attempt(database, rollout)
    injector, port = FaultInjector(tmp_path / "faults"), free_port()
    url = f"http://127.0.0.1:{port}"
    options = {"model_path": tiny_model, "database_url": database.dsn, "engine_urls": [url], "hold_seconds": 120.0}
    async with (
        running_gateway(tmp_path, run_id=run.id, **options) as gateway,  # type: ignore[arg-type]
        fleet_of(database, redis_url, url) as fleet,
    ):
        agents = [Agent(gateway, rollout.id) for rollout in rollouts]
        async with engine_process(tiny_model, port, injector) as engine, asyncio.TaskGroup() as asking:
            fleet.set_target(TargetVersion(run.id, 0, str(weights[0]), weights_sha256(weights[0])))
            for agent in agents:
                asking.create_task(agent.ask())
            await came_true(lambda: all(agent.has_begun for agent in agents))
            await holds(url, TOKENS_BEFORE)
            injector.arm(point)
            fleet.set_target(TargetVersion(run.id, 1, str(weights[1]), weights_sha256(weights[1])))
            async with asyncio.timeout(120):
                assert await engine.wait() == -signal.SIGKILL
            async with engine_process(tiny_model, port, injector):
                await came_true(lambda: fleet.served_version(run.id) == 1)
                await came_true(lambda: all(agent.finish is not None for agent in agents))
        calls = await all_calls(database)

    assert [agent.finish for agent in agents] == ["length"] * STREAMS
    assert [(call.status, call.completion_tokens) for call in calls] == [("completed", TOKENS)] * STREAMS
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in weights]
    for call in calls:
        versions = np.frombuffer(call.policy_versions, "<i4").tolist()
        assert [version for version, _ in groupby(versions)] == [0, 1]
        first = [scored(model, call) for model in models]
        wanted = [first[version][place] for place, version in enumerate(versions)]
        assert np.frombuffer(call.generator_logprobs, "<f4").tolist() == pytest.approx(wanted, abs=1e-4)


def scored(model: Any, call: tables.ModelCall) -> list[float]:
    """Log-probabilities of what was sampled, by a plain forward pass."""
    prompt, sampled = (np.frombuffer(ids, "<i4").astype(np.int64) for ids in (call.prompt_ids, call.sampled_ids))
    ids = torch.from_numpy(np.concatenate([prompt, sampled]))
    with torch.no_grad():
        logits = model(ids.unsqueeze(0)).logits[0]
    logits[:, END_OF_TURN] += BIAS
    found = logits.log_softmax(-1)[:-1].gather(1, ids[1:].unsqueeze(1)).squeeze(1)
    listed: list[float] = found[len(prompt) - 1 :].tolist()
    return listed
