"""LoRA adapters of two runs beside one base model: each samples as its trainer computes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.weights import ADAPTER_FOLDER
from leyden.services.controller.engines.client import EngineClient as Control
from leyden.services.controller.engines.client import EngineRefused
from leyden.services.controller.settings import Settings
from leyden.services.trainer.state.assembly import assemble_learner, make_accelerator
from leyden.services.trainer.state.versions import export_version
from leyden.services.trainer.step.learner import Learner
from leyden.services.trainer.step.step import optimizer_step
from tests.contract.conftest import KINDS
from tests.fakes import real_sglang
from tests.fakes.engine_client import ADMIN_KEY, KEY, EngineClient
from tests.fakes.tiny_engine import served_engine
from tests.support.shared import free_port
from tests.unit.trainer.cases import agent_samples

ADAPTERS = (
    *("--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", "16", "--lora-target-modules", "all"),
    *("--max-loras-per-batch", "4", "--max-loaded-loras", "4"),
)
PROMPT = list(range(3, 20))
SAMPLING = {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True}
LARGEST_GAP = {"stand-in": 1e-4, "sglang": 1e-3}
"""Bound on the largest gap of log-probabilities between engine and trainer, natural logarithm."""


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def sglang_url(kind: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str | None]:
    if kind != "sglang":
        yield None
        return
    log = tmp_path_factory.mktemp("sglang") / "server.log"
    with real_sglang.serving_sglang(tiny_model, free_port(), log, *ADAPTERS) as url:
        yield url


@pytest.fixture
async def engine(sglang_url: str | None, tiny_model: Path) -> AsyncIterator[EngineClient]:
    if sglang_url is None:
        async with served_engine(tiny_model, api_key=KEY, admin_api_key=ADMIN_KEY) as stand_in:
            yield stand_in
        return
    async with httpx.AsyncClient(base_url=sglang_url, headers={"authorization": f"Bearer {KEY}"}, timeout=60) as http:
        yield EngineClient(http, str(tiny_model))


@pytest.fixture
async def control(engine: EngineClient) -> AsyncIterator[Control]:
    settings = Settings(engine_api_key=KEY, engine_admin_key=ADMIN_KEY)
    async with httpx.AsyncClient(timeout=120, trust_env=False) as http:
        control = Control(str(engine.http.base_url).rstrip("/"), http, settings)
        yield control
        for name in await control.adapters():
            await control.unload_adapter(name)


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trained(base: Path, folder: Path, seed: int, **lora: Any) -> tuple[Learner, Path]:
    """A learner after two steps with adapters of rank 4, and the folder of its adapter."""
    document = {
        "name": "n",
        "dataset": "d",
        "agent": {"command": ["x"]},
        "optimizer": {"learning_rate": 1e-2},
        "training": {"lora": {"rank": 4, "alpha": 8.0, **lora}},
        "sampling": {"seed": seed},
    }
    config = RunConfig.model_validate(document)
    learner = assemble_learner(base, config, make_accelerator("cpu", "float32"))
    for number in range(2):
        optimizer_step(learner, agent_samples(10 * seed + number), config)
    return learner, export_version(learner, base, folder).path / ADAPTER_FOLDER


def gap(learner: Learner, answer: dict[str, Any]) -> float:
    """The largest gap between an answer's log-probabilities and those of the trainer's model."""
    ids = answer["output_ids"]
    claimed = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    with torch.no_grad():
        scores = learner.model(input_ids=torch.tensor([PROMPT + ids])).logits[0].log_softmax(-1)
    computed = scores[range(len(PROMPT) - 1, len(PROMPT) + len(ids) - 1), ids].numpy()
    return float(np.abs(computed - claimed).max())


async def test_runs_sample_with_their_own_adapters(
    engine: EngineClient, control: Control, kind: str, tiny_model: Path, tmp_path: Path
) -> None:
    learners = {}
    for seed, name in enumerate(("run-a:2", "run-b:2"), 1):
        modules = {} if seed == 1 else {"target_modules": ["q_proj", "v_proj", "down_proj"]}
        learners[name], folder = trained(tiny_model, tmp_path / str(seed), seed, **modules)
        await control.load_adapter(name, str(folder))
    assert await control.adapters() == set(learners)

    async def generate(name: str | None) -> dict[str, Any]:
        chosen = {} if name is None else {"lora_path": name, "extra_key": name}
        body = {"input_ids": PROMPT, "sampling_params": SAMPLING, "return_logprob": True}
        answer: dict[str, Any] = await engine.generate(**body, **chosen)
        return answer

    for _ in range(2):
        # Together, so that one batch holds tokens of both adapters and of none.
        of_a, of_b, of_base = await asyncio.gather(*(generate(name) for name in (*learners, None)))
        with one_thread():
            gaps = [[gap(learner, answer) for learner in learners.values()] for answer in (of_a, of_b, of_base)]
        bound = LARGEST_GAP[kind]
        assert gaps[0][0] < bound < gaps[0][1] and gaps[1][1] < bound < gaps[1][0]
        assert min(gaps[2]) > bound
    assert of_a["meta_info"]["weight_version"] == of_base["meta_info"]["weight_version"]


async def test_adapters_are_loaded_and_unloaded_by_name(
    engine: EngineClient, control: Control, tiny_model: Path, tmp_path: Path
) -> None:
    _, folder = trained(tiny_model, tmp_path / "a", 1)
    await control.load_adapter("run-a:1", str(folder))
    with pytest.raises(EngineRefused, match=r"(?i)already"):
        await control.load_adapter("run-a:1", str(folder))
    await control.unload_adapter("run-a:1")
    assert await control.adapters() == set()
    with pytest.raises(EngineRefused):
        await control.unload_adapter("run-a:1")
    # SGLang loads an adapter again that it has unloaded, for a request that names it.
    answer = await engine.http.post("/generate", json={"input_ids": PROMPT, "lora_path": "run-c:1"})
    # The gateway reads these words as an engine that lacks the adapter.
    assert answer.status_code == 400 and "lora adapter" in answer.text.lower()
    await control.load_adapter("run-a:1", str(folder))
    await engine.generate(input_ids=PROMPT, lora_path="run-a:1")


async def test_an_adapter_that_does_not_fit_is_refused_and_the_engine_serves_on(
    engine: EngineClient, control: Control, tiny_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(EngineRefused):
        await control.load_adapter("run-a:1", str(tmp_path / "nowhere"))
    _, folder = trained(tiny_model, tmp_path / "a", 1)
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "r": 64}))
    with pytest.raises(EngineRefused):
        await control.load_adapter("run-a:1", str(folder))
    assert await control.adapters() == set()
    await engine.generate(input_ids=PROMPT)


async def test_the_stand_in_refuses_adapters_of_other_layers(tiny_model: Path, tmp_path: Path) -> None:
    _, folder = trained(tiny_model, tmp_path / "a", 1)
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(
        {**tensors, "base_model.model.lm_head.lora_A.weight": torch.ones(4, 4)}, folder / "adapter_model.safetensors"
    )
    async with served_engine(tiny_model) as engine:
        answer = await engine.control("/load_lora_adapter", lora_name="n", lora_path=str(folder))
    assert answer.status_code == 400 and "lm_head" in answer.json()["error_message"]
