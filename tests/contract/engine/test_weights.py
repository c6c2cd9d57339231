"""Pauses and new weights while requests are in flight, as SGLang was seen to do them."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
import weakref
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from leyden.services.engine import ahead as ahead_module
from leyden.services.engine import engine as engine_module
from leyden.services.engine.ahead import Ahead
from leyden.services.engine.coming import Preparation
from leyden.services.engine.sequence import Sequence
from leyden.services.engine.tiny import make_tiny_model
from leyden.services.engine.weights import load_weights
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


async def begun(engine: Client, **body: Any) -> tuple[AsyncIterator[dict[str, Any]], dict[str, Any]]:
    """A stream that has sampled, and its first chunk."""
    stream = engine.stream(input_ids=PROMPT, return_logprob=True, sampling_params=LONG, **body)
    return stream, await anext(stream)


async def last_of(stream: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
    return [chunk async for chunk in stream][-1]


async def load(engine: Client, folder: Path, **body: Any) -> Any:
    return await engine.control("/update_weights_from_disk", model_path=str(folder), **body)


async def spans_of(engine: Client, mode: str, new_weights: Path) -> tuple[dict[str, Any], int]:
    """The answer to a request that lived through a pause and an update, and how many tokens came before."""
    stream, _ = await begun(engine)
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


async def test_pause_with_abort_answers_what_is_in_flight_and_holds_the_next(engine: Client) -> None:
    stream, _ = await begun(engine)
    await engine.control("/pause_generation")
    assert (await last_of(stream))["meta_info"]["finish_reason"]["type"] == "abort"
    held = asyncio.create_task(engine.generate(input_ids=PROMPT))
    assert not (await asyncio.wait([held], timeout=0.2))[0]
    assert (await engine.http.get("/health")).status_code == 200
    await engine.control("/continue_generation")
    assert (await held)["output_ids"]


async def test_health_generate_fails_while_paused(tiny_model: Path) -> None:
    async with served_engine(tiny_model, health_timeout_seconds=3.0) as client:
        await client.control("/pause_generation")
        assert (await client.http.get("/health_generate")).status_code == 503
        await client.control("/continue_generation")
        assert (await client.http.get("/health_generate")).status_code == 200


async def test_an_update_waits_for_requests_in_flight(engine: Client, new_weights: Path) -> None:
    stream, _ = await begun(engine)
    update = asyncio.create_task(load(engine, new_weights, weight_version="r:1"))
    answer = await last_of(stream)
    assert answer["meta_info"]["weight_versions"] == [{"version": "r:0", "start": 0, "end": 400}]
    content = (await update).json()
    assert content["success"], content
    info = (await engine.http.get("/model_info")).json()
    assert (info["weight_version"], info["model_path"]) == ("r:1", str(new_weights))


async def test_abort_all_requests_makes_an_update_immediate(engine: Client, new_weights: Path) -> None:
    stream, _ = await begun(engine)
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
    stream, _ = await begun(engine)
    await engine.control("/pause_generation", mode="in_place")
    assert (await engine.control("/flush_cache")).status_code == 400
    answer = await load(engine, new_weights, weight_version="r:1")
    assert (answer.status_code, answer.json()["success"]) == (400, False)
    assert (await engine.http.get("/model_info")).json()["weight_version"] == "r:0"
    await engine.control("/continue_generation")
    assert (await last_of(stream))["meta_info"]["weight_version"] == "r:1"


async def test_a_label_changes_without_aborting_when_asked(engine: Client) -> None:
    stream, _ = await begun(engine)
    answer = await engine.control("/update_weight_version", new_version="r:9", abort_all_requests=False)
    assert answer.json()["new_version"] == "r:9"
    chunk = await last_of(stream)
    assert [span["version"] for span in chunk["meta_info"]["weight_versions"]] == ["r:0", "r:9"]
    stream, _ = await begun(engine)
    await engine.control("/update_weight_version", new_version="r:10")
    assert (await last_of(stream))["meta_info"]["finish_reason"]["type"] == "abort"


async def test_flush_cache_empties_an_idle_engine(engine: Client) -> None:
    body = {"input_ids": list(range(50, 100))}
    await engine.generate(**body)
    assert (await engine.http.get("/flush_cache")).status_code == 200
    assert (await engine.generate(**body))["meta_info"]["cached_tokens"] == 0


async def test_prepared_weights_serve_after_the_update_and_not_before(
    engine: Client, new_weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = await engine.generate(input_ids=PROMPT, return_logprob=True, sampling_params=GREEDY)
    answer = await engine.control("/prepare_weights_from_disk", model_path=str(new_weights))
    assert (answer.status_code, answer.json()["success"]) == (200, True)
    between = await engine.generate(input_ids=PROMPT, return_logprob=True, sampling_params=GREEDY)
    assert (between["output_ids"], between["meta_info"]["weight_version"]) == (old["output_ids"], "r:0")

    read = engine_module.load_weights
    folders: list[Path] = []
    monkeypatch.setattr(
        engine_module, "load_weights", lambda folder, *rest: folders.append(folder) or read(folder, *rest)
    )
    assert (await load(engine, new_weights, weight_version="r:1")).status_code == 200
    assert folders == []
    prepared = await engine.generate(input_ids=PROMPT, return_logprob=True, sampling_params=GREEDY)
    assert (await load(engine, new_weights, weight_version="r:2")).status_code == 200
    assert folders == [new_weights]
    loaded = await engine.generate(input_ids=PROMPT, return_logprob=True, sampling_params=GREEDY)
    assert prepared["output_ids"] == loaded["output_ids"] != old["output_ids"]


async def test_weights_replaced_after_they_were_prepared_are_read_again(engine: Client, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "version", seed=1)
    assert (await engine.control("/prepare_weights_from_disk", model_path=str(folder))).status_code == 200
    other = make_tiny_model(tmp_path / "other", seed=2)
    shutil.rmtree(folder)
    other.rename(folder)
    assert (await load(engine, folder, weight_version="r:1")).status_code == 200
    found = await engine.generate(input_ids=PROMPT, return_logprob=True, sampling_params=GREEDY)
    async with served_engine(folder) as fresh:
        wanted = await fresh.generate(input_ids=PROMPT, return_logprob=True, sampling_params=GREEDY)
    assert found["output_ids"] == wanted["output_ids"]


async def test_weights_pruned_after_they_were_prepared_are_served(engine: Client, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "version", seed=1)
    assert (await engine.control("/prepare_weights_from_disk", model_path=str(folder))).status_code == 200
    shutil.rmtree(folder)
    assert (await load(engine, folder, weight_version="r:1")).status_code == 200
    found = await engine.generate(input_ids=PROMPT, sampling_params=GREEDY)
    assert found["meta_info"]["weight_version"] == "r:1"


async def test_what_a_broken_preparation_left_is_served_to_nobody(
    engine: Client, new_weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead_module, "SLICE", 16)
    read, folders = engine_module.load_weights, []
    monkeypatch.setattr(
        engine_module, "load_weights", lambda folder, *rest: folders.append(folder) or read(folder, *rest)
    )
    compute = Ahead._compute

    def broken(ahead: Ahead, batch: Any) -> None:
        compute(ahead, batch)
        raise MemoryError("no room")

    monkeypatch.setattr(Ahead, "_compute", broken)
    stream, _ = await begun(engine)
    while len(next(iter(engine.engine._live.values())).output_ids) < 32:
        await anext(stream)
    assert (await engine.control("/prepare_weights_from_disk", model_path=str(new_weights))).status_code == 500
    await engine.control("/pause_generation", mode="retract")
    assert (await load(engine, new_weights, weight_version="r:1")).status_code == 200
    await engine.control("/continue_generation")
    # Read anew, in whose place nothing was computed before.
    assert folders == [new_weights, new_weights]
    assert len((await last_of(stream))["output_ids"]) == 400


async def test_weights_that_cannot_be_prepared_are_refused_and_the_old_ones_serve(
    engine: Client, tmp_path: Path
) -> None:
    answer = await engine.control("/prepare_weights_from_disk", model_path=str(tmp_path))
    assert (answer.status_code, answer.json()["success"]) == (400, False)
    served = await engine.generate(input_ids=PROMPT, sampling_params=GREEDY)
    assert served["meta_info"]["weight_version"] == "r:0"


async def test_streams_go_on_while_what_they_need_is_computed_ahead(
    engine: Client, new_weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead_module, "SLICE", 16)
    # Read at once, so that the stream does not end before.
    weights = load_weights(new_weights, engine.engine.config)
    monkeypatch.setattr(engine_module, "load_weights", lambda *_: weights)
    scheduler, did = engine.engine.scheduler, []
    advance, step = Ahead.advance, scheduler.step
    monkeypatch.setattr(Ahead, "advance", lambda ahead: did.append("slice") or advance(ahead))
    # Slowly, so that few tokens are sampled between the preparation and the pause.
    monkeypatch.setattr(scheduler, "step", lambda: did.append("step") or time.sleep(0.002) or step())
    stream = engine.stream(input_ids=list(range(20, 220)), sampling_params={**LONG, "max_new_tokens": 1000})
    await anext(stream)
    assert (await engine.control("/prepare_weights_from_disk", model_path=str(new_weights))).status_code == 200
    assert did.count("slice") > 200 // 16
    assert ("slice", "slice") not in pairwise(did)
    computed = scheduler.totals.prefill_tokens
    await engine.control("/pause_generation", mode="retract")
    assert (await engine.http.get("/model_info")).json()["weight_version"] == "r:0"
    assert (await load(engine, new_weights, weight_version="r:1")).status_code == 200
    await engine.control("/continue_generation")
    spans = (await last_of(stream))["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["r:0", "r:1"]
    # Of 200 tokens and all that was sampled: what was left in the end, and sampled until the pause.
    assert scheduler.totals.prefill_tokens - computed < 200


async def test_a_request_that_comes_while_a_slice_is_computed_joins_the_step_after_it(
    engine: Client, new_weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, did, computing, queued = engine.engine.scheduler, [], threading.Event(), threading.Event()
    submit, step, add = engine.engine.submit, scheduler.step, scheduler.submit

    async def submit_and_tell(sequences: list[Sequence]) -> None:
        submitting = asyncio.ensure_future(submit(sequences))
        # It runs until it waits for the engine's thread.
        await asyncio.sleep(0)
        queued.set()
        await submitting

    def advance(_: Ahead) -> bool:
        computing.set()
        assert queued.wait(60)
        did.append("slice")
        return False

    stream, _ = await begun(engine)
    monkeypatch.setattr(Ahead, "advance", advance)
    monkeypatch.setattr(engine.engine, "submit", submit_and_tell)
    monkeypatch.setattr(scheduler, "submit", lambda sequences: did.append("request") or add(sequences))
    monkeypatch.setattr(scheduler, "step", lambda: did.append("step") or step())
    preparing = asyncio.create_task(engine.control("/prepare_weights_from_disk", model_path=str(new_weights)))
    assert await asyncio.to_thread(computing.wait, 60)
    await engine.generate(input_ids=PROMPT, sampling_params=GREEDY)
    assert (await preparing).status_code == 200
    begin = did.index("slice")
    assert did[begin : begin + 3] == ["slice", "request", "step"]
    assert len((await last_of(stream))["output_ids"]) == 400


async def test_a_preparation_answers_while_generation_is_paused(engine: Client, new_weights: Path) -> None:
    stream, _ = await begun(engine)
    await engine.control("/pause_generation", mode="in_place")
    assert (await engine.control("/prepare_weights_from_disk", model_path=str(new_weights))).status_code == 200
    await engine.control("/continue_generation")
    assert len((await last_of(stream))["output_ids"]) == 400


async def test_other_weights_end_the_work_for_those_prepared_before(
    engine: Client, new_weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead_module, "SLICE", 4)
    other = make_tiny_model(tmp_path / "other", seed=2)
    advancing = asyncio.Event()
    loop, advance, models = asyncio.get_running_loop(), Ahead.advance, []

    def told(ahead: Ahead) -> bool:
        models.append(ahead._model)
        loop.call_soon_threadsafe(advancing.set)
        # The first one would go on for ever.
        return advance(ahead) or ahead._model is models[0]

    monkeypatch.setattr(Ahead, "advance", told)
    stream, _ = await begun(engine)
    first = asyncio.create_task(engine.control("/prepare_weights_from_disk", model_path=str(new_weights)))
    await advancing.wait()
    assert (await engine.control("/prepare_weights_from_disk", model_path=str(other))).status_code == 200
    assert (await first).status_code == 200
    assert len((await last_of(stream))["output_ids"]) == 400


async def test_a_preparation_asked_for_again_joins_the_one_under_way(
    engine: Client, new_weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, folders = engine_module.load_weights, []
    monkeypatch.setattr(
        engine_module, "load_weights", lambda folder, *rest: folders.append(folder) or read(folder, *rest)
    )
    joined, is_under_way, models = threading.Event(), Preparation.is_under_way, set()

    def told(preparation: Preparation, *weights: Any) -> bool:
        found = is_under_way(preparation, *weights)
        if found:
            joined.set()
        return found

    def advance(ahead: Ahead) -> bool:
        models.add(id(ahead._model))
        return not joined.wait(0.01)

    monkeypatch.setattr(Preparation, "is_under_way", told)
    monkeypatch.setattr(Ahead, "advance", advance)
    asked = [engine.control("/prepare_weights_from_disk", model_path=str(new_weights)) for _ in range(2)]
    assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200, 200]
    assert (folders, len(models)) == ([new_weights], 1)


async def test_what_does_not_go_on_by_the_weights_prepared_is_not_computed_by_them(
    engine: Client, new_weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slices, advance = [], Ahead.advance
    monkeypatch.setattr(Ahead, "advance", lambda ahead: slices.append(ahead) or advance(ahead))
    stream, _ = await begun(engine)
    answer = await engine.control("/prepare_weights_from_disk", model_path=str(new_weights), compute_ahead=False)
    assert (answer.status_code, slices) == (200, [])
    assert (await engine.control("/prepare_weights_from_disk", model_path=str(new_weights))).status_code == 200
    assert slices != []
    assert len((await last_of(stream))["output_ids"]) == 400


async def test_weights_prepared_before_are_not_read_again_and_compute_what_came_since(
    engine: Client, new_weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead_module, "SLICE", 16)
    read, folders, slices, advance = engine_module.load_weights, [], [], Ahead.advance
    monkeypatch.setattr(
        engine_module, "load_weights", lambda folder, *rest: folders.append(folder) or read(folder, *rest)
    )
    monkeypatch.setattr(Ahead, "advance", lambda ahead: slices.append(ahead._model.epoch) or advance(ahead))
    assert (await engine.control("/prepare_weights_from_disk", model_path=str(new_weights))).status_code == 200
    assert engine.engine._coming._prepared is not None
    epoch = engine.engine._coming._prepared.model.epoch
    stream, _ = await begun(engine)
    assert (await engine.control("/prepare_weights_from_disk", model_path=str(new_weights))).status_code == 200
    assert (folders, set(slices)) == ([new_weights], {epoch})
    assert len((await last_of(stream))["output_ids"]) == 400


async def test_weights_replaced_between_two_preparations_are_read_again(engine: Client, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "version", seed=1)
    assert (await engine.control("/prepare_weights_from_disk", model_path=str(folder))).status_code == 200
    other = make_tiny_model(tmp_path / "other", seed=2)
    shutil.rmtree(folder)
    other.rename(folder)
    assert (await engine.control("/prepare_weights_from_disk", model_path=str(folder))).status_code == 200
    # Pruned: what was prepared last serves.
    kept = folder.rename(tmp_path / "kept")
    assert (await load(engine, folder, weight_version="r:1")).status_code == 200
    found = await engine.generate(input_ids=PROMPT, return_logprob=True, sampling_params=GREEDY)
    async with served_engine(kept) as fresh:
        wanted = await fresh.generate(input_ids=PROMPT, return_logprob=True, sampling_params=GREEDY)
    assert found["output_ids"] == wanted["output_ids"]


async def test_weights_asked_for_last_are_read_once_those_asked_for_before_are_and_are_kept(
    engine: Client, new_weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, skipped = (make_tiny_model(tmp_path / name, seed=2) for name in ("slow", "skipped"))
    read, reading, go_on = engine_module.load_weights, asyncio.Event(), threading.Event()
    loop, folders = asyncio.get_running_loop(), []

    def load_weights(folder: Path, *rest: Any) -> Any:
        folders.append(folder)
        if folder == slow:
            loop.call_soon_threadsafe(reading.set)
            assert go_on.wait(60)
        return read(folder, *rest)

    monkeypatch.setattr(engine_module, "load_weights", load_weights)
    asked = []
    for folder in (slow, skipped, new_weights):
        asked.append(asyncio.create_task(engine.control("/prepare_weights_from_disk", model_path=str(folder))))
        async with asyncio.timeout(60):
            await reading.wait()
            while engine.engine._coming._preparation is None or engine.engine._coming._preparation.folder != folder:
                await asyncio.sleep(0.01)
    # Served meanwhile.
    assert (await engine.generate(input_ids=PROMPT, sampling_params=LONG))["meta_info"]["weight_version"] == "r:0"
    assert folders == [slow]
    go_on.set()
    assert [(await answer).status_code for answer in asked] == [200, 200, 200]
    assert (await load(engine, new_weights, weight_version="r:1")).status_code == 200
    assert folders == [slow, new_weights]


async def test_prepared_weights_make_room_before_an_update_reads_others(
    engine: Client, new_weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_tiny_model(tmp_path / "other", seed=2)
    assert (await engine.control("/prepare_weights_from_disk", model_path=str(new_weights))).status_code == 200
    assert engine.engine._coming._prepared is not None
    prepared, read, in_memory = weakref.ref(engine.engine._coming._prepared.model), engine_module.load_weights, []

    def load_weights(folder: Path, *rest: Any) -> Any:
        # A thread that has just handed them over may hold them a moment longer.
        until = time.monotonic() + 20
        while prepared() is not None and time.monotonic() < until:
            time.sleep(0.01)
        in_memory.append(prepared() is not None)
        return read(folder, *rest)

    monkeypatch.setattr(engine_module, "load_weights", load_weights)
    assert (await load(engine, other, weight_version="r:1")).status_code == 200
    assert in_memory == [False]
