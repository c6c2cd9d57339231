"""Pauses and weight updates while requests are in flight, with SGLang's observed behaviour."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.fakes.engine_client import EngineClient
from tests.fakes.real_sglang import HEALTH_SECONDS
from tests.fakes.tiny_engine import served_engine

PROMPT = [72, 69, 76, 76, 79]
LONG = {"max_new_tokens": 400, "ignore_eos": True}
GREEDY = {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0.0}


async def started(engine: EngineClient, **body: Any) -> tuple[AsyncIterator[dict[str, Any]], dict[str, Any]]:
    """A stream that has sampled, and its first chunk."""
    stream = engine.stream(input_ids=PROMPT, return_logprob=True, sampling_params=LONG, **body)
    return stream, await anext(stream)


async def last_of(stream: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
    return [chunk async for chunk in stream][-1]


async def load(engine: EngineClient, folder: Path, **body: Any) -> Any:
    return await engine.control("/update_weights_from_disk", model_path=str(folder), **body)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_tokens_name_the_weights_that_sampled_them(
    engine: EngineClient, mode: str, tiny_model: Path, new_weights: Path
) -> None:
    stream, _ = await started(engine)
    await engine.control("/pause_generation", mode=mode)
    label = {"weight_version": "r:1", "flush_cache": mode == "retract"}
    assert (await load(engine, new_weights, **label)).status_code == 200
    await engine.control("/continue_generation")
    answer = await last_of(stream)

    ids, meta = answer["output_ids"], answer["meta_info"]
    assert (meta["weight_version"], meta["num_retractions"]) == ("r:1", 1 if mode == "retract" else 0)
    before, after = meta["weight_versions"]
    assert 0 < before["end"] < 400
    assert (before, after) == (
        {"version": "r:0", "start": 0, "end": before["end"]},
        {"version": "r:1", "start": before["end"], "end": 400},
    )
    measured = [entry[0] for entry in meta["output_token_logprobs"]]
    old, new = (scored(weights, ids) for weights in (tiny_model, new_weights))
    boundary = before["end"]
    assert measured[:boundary] == pytest.approx(old[:boundary], abs=1e-4)
    if mode == "retract":
        # Frozen requests go on with keys and values of the old weights, so that no model gives their numbers.
        assert measured[boundary:] == pytest.approx(new[boundary:], abs=1e-4)


def scored(weights: Path, ids: list[int]) -> list[float]:
    """Log-probabilities of sampled tokens by a plain forward pass."""
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(weights)(torch.tensor([PROMPT + ids])).logits[0]
    return [float(row[token]) for row, token in zip(logits.log_softmax(-1)[len(PROMPT) - 1 :], ids, strict=False)]


async def test_pause_with_abort_ends_requests_in_flight_and_delays_new_ones(engine: EngineClient) -> None:
    stream, _ = await started(engine)
    await engine.control("/pause_generation")
    assert (await last_of(stream))["meta_info"]["finish_reason"]["type"] == "abort"
    waiting = asyncio.create_task(engine.generate(input_ids=PROMPT))
    assert not (await asyncio.wait([waiting], timeout=0.2))[0]
    assert (await engine.http.get("/health")).status_code == 200
    await engine.control("/continue_generation")
    assert (await waiting)["output_ids"]


async def test_health_generate_fails_while_paused_and_health_does_not(engine: EngineClient) -> None:
    await engine.control("/pause_generation")
    started_at = time.monotonic()
    assert (await engine.http.get("/health_generate")).status_code == 503
    assert time.monotonic() - started_at > HEALTH_SECONDS - 1
    assert (await engine.http.get("/health")).status_code == 200
    await engine.control("/continue_generation")
    assert (await engine.http.get("/health_generate")).status_code == 200


async def test_an_update_waits_for_requests_in_flight(engine: EngineClient, new_weights: Path) -> None:
    stream, _ = await started(engine)
    update = asyncio.create_task(load(engine, new_weights, weight_version="r:1"))
    answer = await last_of(stream)
    assert answer["meta_info"]["weight_versions"] == [{"version": "r:0", "start": 0, "end": 400}]
    content = (await update).json()
    assert content["success"], content
    info = (await engine.http.get("/model_info")).json()
    assert (info["weight_version"], info["model_path"]) == ("r:1", str(new_weights))


async def test_abort_all_requests_makes_an_update_immediate(engine: EngineClient, new_weights: Path) -> None:
    stream, _ = await started(engine)
    answer = await load(engine, new_weights, weight_version="r:1", abort_all_requests=True)
    assert answer.json()["success"], answer.text
    assert (await last_of(stream))["meta_info"]["finish_reason"]["type"] == "abort"


async def test_no_prefix_survives_new_weights(engine: EngineClient, new_weights: Path) -> None:
    body = {"input_ids": list(range(50, 100)), "return_logprob": True, "sampling_params": {"temperature": 0}}
    await engine.generate(**body)
    assert (await engine.generate(**body))["meta_info"]["cached_tokens"] == 49
    await load(engine, new_weights, weight_version="r:1", flush_cache=True)
    fresh = await engine.generate(**body)
    assert fresh["meta_info"]["cached_tokens"] == 0
    async with served_engine(new_weights) as other:
        expected = await other.generate(**body)
    assert fresh["output_ids"] == expected["output_ids"]


async def test_a_key_by_version_separates_the_cache_where_no_flush_does(
    engine: EngineClient, new_weights: Path
) -> None:
    body = {"input_ids": list(range(50, 100)), "return_logprob": True, "sampling_params": {"temperature": 0}}
    await engine.generate(**body, extra_key="r:0")
    await load(engine, new_weights, weight_version="r:1", flush_cache=False)
    fresh = await engine.generate(**body, extra_key="r:1")
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


async def is_refused(engine: EngineClient, folder: Path) -> None:
    """Offers weights that cannot be served: the engine answers 400 and serves the old ones."""
    body = {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 5}}
    before = await engine.generate(**body)
    answer = await load(engine, folder, weight_version="r:1")
    assert (answer.status_code, answer.json()["success"]) == (400, False)
    assert (await engine.http.get("/model_info")).json()["weight_version"] == "r:0"
    after = await engine.generate(**body)
    assert after["output_ids"] == before["output_ids"]
    assert after["meta_info"]["weight_version"] == "r:0"


@pytest.mark.parametrize("kind", ["absent"])
async def test_bad_weights_are_refused_and_the_old_ones_served_on(
    engine: EngineClient, kind: str, new_weights: Path, tmp_path: Path
) -> None:
    await is_refused(engine, tmp_path / "absent" if kind == "absent" else damaged(kind, tmp_path / "bad", new_weights))


@pytest.mark.parametrize("kind", ["missing", "misshapen", "not finite", "truncated"])
async def test_the_stand_in_refuses_weights_that_sglang_serves_or_dies_of(
    kind: str, tiny_model: Path, new_weights: Path, tmp_path: Path
) -> None:
    async with served_engine(tiny_model, weight_version="r:0") as stand_in:
        await is_refused(stand_in, damaged(kind, tmp_path / "bad", new_weights))


async def test_a_flush_beside_frozen_requests_fails_as_sglangs_does(engine: EngineClient, new_weights: Path) -> None:
    stream, _ = await started(engine)
    await engine.control("/pause_generation", mode="in_place")
    assert (await engine.control("/flush_cache")).status_code == 400
    answer = await load(engine, new_weights, weight_version="r:1")
    assert (answer.status_code, answer.json()["success"]) == (400, False)
    assert (await engine.http.get("/model_info")).json()["weight_version"] == "r:0"
    await engine.control("/continue_generation")
    assert (await last_of(stream))["meta_info"]["weight_version"] == "r:1"


async def test_a_version_label_can_change_without_aborting_requests(engine: EngineClient) -> None:
    stream, _ = await started(engine)
    answer = await engine.control("/update_weight_version", new_version="r:9", abort_all_requests=False)
    assert answer.json()["new_version"] == "r:9"
    chunk = await last_of(stream)
    assert [span["version"] for span in chunk["meta_info"]["weight_versions"]] == ["r:0", "r:9"]
    stream, _ = await started(engine)
    await engine.control("/update_weight_version", new_version="r:10")
    assert (await last_of(stream))["meta_info"]["finish_reason"]["type"] == "abort"


async def test_flush_cache_empties_an_idle_engine(engine: EngineClient) -> None:
    body = {"input_ids": list(range(50, 100))}
    await engine.generate(**body)
    assert (await engine.control("/flush_cache")).status_code == 200
    assert (await engine.generate(**body))["meta_info"]["cached_tokens"] == 0
