"""Pauses and weight updates while requests are in flight, with SGLang's observed behaviour."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from leyden.services.engine.tiny import make_tiny_model
from tests.fakes.tiny_engine import Client, served_engine

PROMPT = [72, 69, 76, 76, 79]
LONG = {"max_new_tokens": 400, "ignore_eos": True}
GREEDY = {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0.0}


@pytest.fixture(scope="module")
def new_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "new", seed=1)


@pytest.fixture
async def engine(tiny_model: Path) -> AsyncIterator[Client]:
    async with served_engine(tiny_model, weight_version="r:0") as client:
        yield client


async def started(engine: Client, **body: Any) -> tuple[AsyncIterator[dict[str, Any]], dict[str, Any]]:
    """A stream that has sampled, and its first chunk."""
    stream = engine.stream(input_ids=PROMPT, return_logprob=True, sampling_params=LONG, **body)
    return stream, await anext(stream)


async def last_of(stream: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
    return [chunk async for chunk in stream][-1]


async def load(engine: Client, folder: Path, **body: Any) -> Any:
    return await engine.control("/update_weights_from_disk", model_path=str(folder), **body)


async def spans_of(engine: Client, mode: str, new_weights: Path) -> tuple[dict[str, Any], int]:
    """The answer to a request that lived through a pause and an update, and how many tokens came before."""
    stream, _ = await started(engine)
    await engine.control("/pause_generation", mode=mode)
    (sequence,) = engine.engine._live.values()
    before = len(sequence.output_ids)
    assert (await load(engine, new_weights, weight_version="r:1", flush_cache=mode == "retract")).status_code == 200
    assert len(sequence.output_ids) == before
    await engine.control("/continue_generation")
    return await last_of(stream), before


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_tokens_name_the_weights_that_sampled_them(engine: Client, mode: str, new_weights: Path) -> None:
    answer, before = await spans_of(engine, mode, new_weights)
    meta = answer["meta_info"]
    assert 0 < before < 400
    assert meta["weight_version"] == "r:1"
    assert meta["weight_versions"] == [
        {"version": "r:0", "start": 0, "end": before},
        {"version": "r:1", "start": before, "end": 400},
    ]
    assert meta["num_retractions"] == (1 if mode == "retract" else 0)


async def test_after_a_retraction_logprobs_are_those_of_the_new_weights(engine: Client, new_weights: Path) -> None:
    answer, before = await spans_of(engine, "retract", new_weights)
    ids = torch.tensor([PROMPT + answer["output_ids"]])
    with torch.no_grad():
        scored = AutoModelForCausalLM.from_pretrained(new_weights)(ids).logits[0].log_softmax(-1)
    expected = [float(scored[len(PROMPT) - 1 + i, answer["output_ids"][i]]) for i in range(before, 400)]
    measured = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    assert measured[before:] == pytest.approx(expected, abs=1e-4)


async def test_pause_with_abort_ends_requests_in_flight_and_delays_new_ones(engine: Client) -> None:
    stream, _ = await started(engine)
    await engine.control("/pause_generation")
    assert (await last_of(stream))["meta_info"]["finish_reason"]["type"] == "abort"
    waiting = asyncio.create_task(engine.generate(input_ids=PROMPT))
    assert not (await asyncio.wait([waiting], timeout=0.2))[0]
    assert (await engine.http.get("/health")).status_code == 200
    await engine.control("/continue_generation")
    assert (await waiting)["output_ids"]


async def test_health_generate_fails_while_paused(tiny_model: Path) -> None:
    async with served_engine(tiny_model, health_timeout_seconds=3.0) as client:
        await client.control("/pause_generation")
        assert (await client.http.get("/health_generate")).status_code == 503
        await client.control("/continue_generation")
        assert (await client.http.get("/health_generate")).status_code == 200


async def test_an_update_waits_for_requests_in_flight(engine: Client, new_weights: Path) -> None:
    stream, _ = await started(engine)
    update = asyncio.create_task(load(engine, new_weights, weight_version="r:1"))
    answer = await last_of(stream)
    assert answer["meta_info"]["weight_versions"] == [{"version": "r:0", "start": 0, "end": 400}]
    content = (await update).json()
    assert content["success"], content
    info = (await engine.http.get("/model_info")).json()
    assert (info["weight_version"], info["model_path"]) == ("r:1", str(new_weights))


async def test_abort_all_requests_makes_an_update_immediate(engine: Client, new_weights: Path) -> None:
    stream, _ = await started(engine)
    answer = await load(engine, new_weights, weight_version="r:1", abort_all_requests=True)
    assert answer.json()["success"]
    assert (await last_of(stream))["meta_info"]["finish_reason"]["type"] == "abort"


async def test_no_prefix_survives_new_weights(engine: Client, new_weights: Path) -> None:
    body = {"input_ids": list(range(50, 100)), "return_logprob": True, "sampling_params": {"temperature": 0}}
    await engine.generate(**body)
    assert (await engine.generate(**body))["meta_info"]["cached_tokens"] == 49
    await load(engine, new_weights, weight_version="r:1", flush_cache=False)
    fresh = await engine.generate(**body)
    assert fresh["meta_info"]["cached_tokens"] == 0
    async with served_engine(new_weights) as other:
        expected = await other.generate(**body)
    assert fresh["output_ids"] == expected["output_ids"]


def damaged(kind: str, folder: Path, source: Path) -> Path:
    """A folder whose weights cannot be served."""
    folder.mkdir()
    tensors = load_file(source / "model.safetensors")
    if kind == "missing":
        del tensors["model.norm.weight"]
    if kind == "misshapen":
        tensors["model.norm.weight"] = torch.ones(3)
    if kind == "not finite":
        tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    if kind == "truncated":
        with (folder / "model.safetensors").open("r+b") as file:
            file.truncate(1000)
    return folder


@pytest.mark.parametrize("kind", ["absent", "missing", "misshapen", "not finite", "truncated"])
async def test_bad_weights_are_refused_and_the_old_ones_served_on(
    engine: Client, kind: str, new_weights: Path, tmp_path: Path
) -> None:
    body = {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 5}}
    before = await engine.generate(**body)
    folder = tmp_path / "absent" if kind == "absent" else damaged(kind, tmp_path / "bad", new_weights)
    answer = await load(engine, folder, weight_version="r:1")
    assert (answer.status_code, answer.json()["success"]) == (400, False)
    assert (await engine.http.get("/model_info")).json()["weight_version"] == "r:0"
    after = await engine.generate(**body)
    assert after["output_ids"] == before["output_ids"]
    assert after["meta_info"]["weight_version"] == "r:0"


async def test_a_flush_beside_frozen_requests_fails_as_sglangs_does(engine: Client, new_weights: Path) -> None:
    stream, _ = await started(engine)
    await engine.control("/pause_generation", mode="in_place")
    assert (await engine.control("/flush_cache")).status_code == 400
    answer = await load(engine, new_weights, weight_version="r:1")
    assert (answer.status_code, answer.json()["success"]) == (400, False)
    assert (await engine.http.get("/model_info")).json()["weight_version"] == "r:0"
    await engine.control("/continue_generation")
    assert (await last_of(stream))["meta_info"]["weight_version"] == "r:1"


async def test_a_version_label_can_change_without_aborting_requests(engine: Client) -> None:
    stream, _ = await started(engine)
    answer = await engine.control("/update_weight_version", new_version="r:9", abort_all_requests=False)
    assert answer.json()["new_version"] == "r:9"
    chunk = await last_of(stream)
    assert [span["version"] for span in chunk["meta_info"]["weight_versions"]] == ["r:0", "r:9"]
    stream, _ = await started(engine)
    await engine.control("/update_weight_version", new_version="r:10")
    assert (await last_of(stream))["meta_info"]["finish_reason"]["type"] == "abort"


async def test_flush_cache_empties_an_idle_engine(engine: Client) -> None:
    body = {"input_ids": list(range(50, 100))}
    await engine.generate(**body)
    assert (await engine.http.get("/flush_cache")).status_code == 200
    assert (await engine.generate(**body))["meta_info"]["cached_tokens"] == 0
