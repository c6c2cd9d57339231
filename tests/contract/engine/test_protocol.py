"""The engine's answers conform to SGLang's own types.

Tests with the fixture `engine` run on the CPU engine and on SGLang; those with `stand_in` on the CPU engine alone.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from leyden.services.engine.auth import CONTROL, allowed
from leyden.services.engine.request import SamplingParams
from tests.contract.conftest import FIRST_VERSION, RUNNING_REQUESTS
from tests.fakes.engine_client import ADMIN_KEY, EngineClient
from tests.fakes.sglang_types import api_types, sglang_module
from tests.fakes.tiny_engine import Client, served_engine

PROMPT = [72, 69, 76, 76, 79]
LONG = {"max_new_tokens": 1500, "ignore_eos": True}
"""So long that no test waits for the end, and so short that all running requests fit into the engine's memory."""


@pytest.fixture(scope="module")
async def stand_in(tiny_model: Path) -> AsyncIterator[Client]:
    async with served_engine(tiny_model, weight_version="run-a:0") as client:
        yield client


def checked(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer, which SGLang's own decoder accepts."""
    decoded = api_types().GenerateResponse.from_json_value(answer)
    assert decoded.output_ids == answer["output_ids"]
    assert decoded.meta_info.completion_tokens == len(answer["output_ids"])
    return answer


def refused_by_sglang(body: dict[str, Any]) -> bool:
    types = api_types()
    try:
        types.GenerateRequest.from_json_value(body)
    except types.JsonContractError:
        return True
    return False


async def test_an_answer_has_sglangs_shape(engine: EngineClient) -> None:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 6, "ignore_eos": True, "temperature": 0.8},
        "return_logprob": True,
        "top_logprobs_num": 2,
        "token_ids_logprob": [5, 6],
        "logprob_start_len": 0,
        "return_prompt_token_ids": True,
        "return_text_in_logprobs": True,
        "rid": "shape",
    }
    assert not refused_by_sglang(body)
    answer = checked(await engine.generate(**body))
    meta = answer["meta_info"]
    assert answer["prompt_token_ids"] == PROMPT
    assert meta["id"] == "shape"
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["num_retractions"]) == (5, 6, 0)
    assert meta["weight_version"] == FIRST_VERSION
    assert meta["weight_versions"] == [{"version": FIRST_VERSION, "start": 0, "end": 6}]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
    assert meta["output_token_logprobs_length"] == 6
    assert [len(top) for top in meta["output_top_logprobs"]] == [2] * 6
    assert [[entry[1] for entry in row] for row in meta["output_token_ids_logprobs"]] == [[5, 6]] * 6
    assert meta["input_token_logprobs"][0][:2] == [None, PROMPT[0]]
    assert [entry[1] for entry in meta["input_token_logprobs"]] == PROMPT
    assert meta["e2e_latency"] >= meta["first_token_latency"] >= 0


async def test_logprobs_over_http_equal_transformers(engine: EngineClient, tiny_model: Path) -> None:
    answer = await engine.generate(
        input_ids=PROMPT, return_logprob=True, sampling_params={"temperature": 0.6, "ignore_eos": True}
    )
    ids = torch.tensor([PROMPT + answer["output_ids"]])
    with torch.no_grad():
        scored = (AutoModelForCausalLM.from_pretrained(tiny_model)(ids).logits[0] / 0.6).log_softmax(-1)
    expected = [float(scored[4 + place, token]) for place, token in enumerate(answer["output_ids"])]
    assert [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]] == pytest.approx(expected, abs=1e-4)


async def test_chunks_are_cumulative_and_the_last_equals_the_full_answer(engine: EngineClient) -> None:
    body = {
        "input_ids": PROMPT,
        "return_logprob": True,
        "sampling_params": {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0},
    }
    chunks = [checked(chunk) async for chunk in engine.stream(**body)]
    complete = await engine.generate(**body)
    for earlier, later in itertools.pairwise(chunks):
        assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
        assert later["text"].startswith(earlier["text"])
        assert earlier["meta_info"]["finish_reason"] is None
    assert chunks[-1]["output_ids"] == complete["output_ids"]
    assert chunks[-1]["text"] == complete["text"]
    streamed, waited = (x["meta_info"]["output_token_logprobs"] for x in (chunks[-1], complete))
    assert [entry[0] for entry in streamed] == pytest.approx([entry[0] for entry in waited], abs=1e-5)


async def test_incremental_chunks_add_up_to_the_complete_answer(tiny_model: Path) -> None:
    sampling = {"max_new_tokens": 40, "ignore_eos": True, "temperature": 0}
    body = {"input_ids": PROMPT, "return_logprob": True, "top_logprobs_num": 2, "sampling_params": sampling}
    async with served_engine(tiny_model, incremental_streaming_output=True) as engine:
        chunks = [chunk async for chunk in engine.stream(**body)]
        complete = await engine.generate(**body)
        assert (await engine.http.get("/server_info")).json()["incremental_streaming_output"] is True
    assert len(chunks) > 1
    assert all(api_types().GenerateResponse.from_json_value(chunk) for chunk in chunks)
    assert [token for chunk in chunks for token in chunk["output_ids"]] == complete["output_ids"]
    assert "".join(chunk["text"] for chunk in chunks) == complete["text"]
    assert chunks[-1]["meta_info"]["completion_tokens"] == 40
    assert chunks[-1]["meta_info"]["weight_versions"] == complete["meta_info"]["weight_versions"]
    for name in ("output_token_logprobs", "output_top_logprobs"):
        streamed = [entry for chunk in chunks for entry in chunk["meta_info"][name]]
        assert len(streamed) == len(complete["meta_info"][name]) == 40


async def test_choices_and_batches_are_lists_in_order(engine: EngineClient) -> None:
    several = await engine.generate(input_ids=PROMPT, sampling_params={"n": 3, "max_new_tokens": 4}, rid="three")
    assert len({checked(answer)["meta_info"]["id"] for answer in several}) == 3
    batch = await engine.generate(
        text=["ab", "abc"], sampling_params={"max_new_tokens": 2, "n": 2}, return_prompt_token_ids=True
    )
    assert [len(checked(answer)["prompt_token_ids"]) for answer in batch] == [2, 2, 3, 3]
    ended = {
        chunk["index"]
        async for chunk in engine.stream(input_ids=PROMPT, sampling_params={"n": 3, "max_new_tokens": 4})
        if chunk["meta_info"]["finish_reason"]
    }
    assert ended == {0, 1, 2}


async def test_stop_strings_are_trimmed_from_text_but_not_from_tokens(engine: EngineClient) -> None:
    greedy = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True}
    free = await engine.generate(text="hello", sampling_params=greedy)
    stop = next(c for c in free["text"][3:] if c.isascii())
    stopped = await engine.generate(text="hello", sampling_params={**greedy, "stop": [stop]})
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert stopped["text"] == free["text"][: free["text"].index(stop)]
    untrimmed = await engine.generate(text="hello", sampling_params={**greedy, "stop": [stop], "no_stop_trim": True})
    assert untrimmed["text"].endswith(stop)
    assert untrimmed["output_ids"] == stopped["output_ids"] == free["output_ids"][: len(untrimmed["output_ids"])]


async def test_stop_tokens_are_in_the_ids_but_not_in_the_text(engine: EngineClient) -> None:
    greedy = {"max_new_tokens": 10, "temperature": 0}
    free = await engine.generate(text="hello", sampling_params={**greedy, "ignore_eos": True})
    token = free["output_ids"][3]
    place = free["output_ids"].index(token)
    stopped = await engine.generate(text="hello", sampling_params={**greedy, "stop_token_ids": [token]})
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
    assert stopped["output_ids"] == free["output_ids"][: place + 1]
    forced = await engine.generate(
        text="hello", sampling_params={**greedy, "stop_token_ids": [token], "min_new_tokens": 8}
    )
    assert len(forced["output_ids"]) >= 8


async def test_the_next_turn_finds_the_last_one_cached(engine: EngineClient) -> None:
    # A completion that ends at its limit: the last token is sampled and never computed.
    # SGLang starts the next step before it sees a stop token, so there the stop token is computed and cached, too.
    first = await engine.generate(
        text="a question nobody asked before",
        sampling_params={"ignore_eos": True, "max_new_tokens": 20},
        return_prompt_token_ids=True,
    )
    ids = first["prompt_token_ids"] + first["output_ids"]
    second = await engine.generate(input_ids=[*ids, 5, 6])
    assert second["meta_info"]["cached_tokens"] == len(ids) - 1
    other = await engine.generate(input_ids=[*ids, 5, 6], extra_key="elsewhere")
    assert other["meta_info"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input_ids": [1, 320]}, "token id 320 is outside of the vocabulary"),
        ({"input_ids": [-1]}, "token id -1 is outside"),
        ({"input_ids": []}, "prompt is empty"),
        ({"input_ids": [1] * 5000}, "The input (5000 tokens) is longer than the model's context length (4096 tokens)."),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 4096}}, "Requested token count exceeds"),
        ({"input_ids": [1], "sampling_params": {"bogus": 1}}, "unknown field `bogus`"),
        ({"input_ids": [1], "sampling_params": {"regex": "a"}}, "not supported"),
        ({"input_ids": [1], "sampling_params": {"logit_bias": {"900": 1.0}}}, "token id 900 is outside"),
        ({"input_ids": ["a"]}, "must be integers"),
    ],
)
async def test_what_cannot_be_served_is_a_400_and_the_engine_lives(
    stand_in: Client, body: dict[str, Any], message: str
) -> None:
    answer = await stand_in.http.post("/generate", json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert (await stand_in.generate(input_ids=[1]))["output_ids"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input_ids": [1] * 5000}, "The input (5000 tokens) is longer than the model's context length (4096 tokens)."),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 4096}}, "Requested token count exceeds"),
    ],
)
async def test_a_request_that_exceeds_the_context_is_a_400(
    engine: EngineClient, body: dict[str, Any], message: str
) -> None:
    answer = await engine.http.post("/generate", json=body)
    assert (answer.status_code, message in answer.json()["error"]["message"]) == (400, True), answer.text


async def test_no_json_is_a_400(engine: EngineClient) -> None:
    assert (await engine.http.post("/generate", content=b"{")).status_code == 400
    admin = {"authorization": f"Bearer {ADMIN_KEY}"}
    assert (await engine.http.post("/pause_generation", headers=admin)).status_code == 400


def test_every_sampling_parameter_is_one_of_sglangs() -> None:
    ours = set(SamplingParams.model_fields)
    for name in ours:
        assert not refused_by_sglang({"text": "a", "sampling_params": {name: None}}), name
    assert refused_by_sglang({"text": "a", "sampling_params": {"bogus": 1}})


def test_keys_authorize_the_same_routes_as_in_sglang() -> None:
    auth = sglang_module("sglang/srt/utils/auth.py")
    for path in ("/generate", "/health", "/metrics", "/flush_cache", "/pause_generation", "/v1/models"):
        level = auth.AuthLevel.ADMIN_OPTIONAL if path in CONTROL else auth.AuthLevel.NORMAL
        for keys in ((None, None), ("k", None), (None, "a"), ("k", "a")):
            for header in (None, "Bearer k", "Bearer a", "Basic k", "Bearer"):
                expected = auth.decide_request_auth(
                    method="POST",
                    path=path,
                    authorization_header=header,
                    api_key=keys[0],
                    admin_api_key=keys[1],
                    auth_level=level,
                )
                assert allowed(path, header, *keys) == expected.allowed, (path, keys, header)


async def test_each_key_opens_its_own_routes(engine: EngineClient) -> None:
    authorization = engine.http.headers.pop("authorization")
    for path in ("/health", "/metrics"):
        assert (await engine.http.get(path)).status_code == 200
    for path in ("/generate", "/pause_generation"):
        assert (await engine.http.post(path, json={"input_ids": [1]})).status_code == 401
    engine.http.headers["authorization"] = authorization
    assert (await engine.generate(input_ids=[1]))["output_ids"]
    assert (await engine.http.get("/model_info")).status_code == 200
    for path in ("/abort_request", "/pause_generation", "/continue_generation", "/update_weights_from_disk"):
        assert (await engine.http.post(path, json={})).status_code == 401, path
    assert (await engine.control("/continue_generation")).status_code == 200


async def test_infos_name_model_version_and_limits(engine: EngineClient) -> None:
    info = (await engine.http.get("/model_info")).json()
    api_types().GetModelInfoResponse.from_json_value(info)
    assert (info["model_path"], info["weight_version"]) == (engine.model_path, FIRST_VERSION)
    server = (await engine.http.get("/server_info")).json()
    assert (server["version"], server["max_total_num_tokens"], server["max_req_input_len"]) == ("0.5.23", 8192, 4090)
    models = (await engine.http.get("/v1/models")).json()
    assert [card["id"] for card in models["data"]] == [engine.model_path]
    await engine.reach(running=0, waiting=0)
    for path in ("/health", "/health_generate"):
        assert (await engine.http.get(path)).status_code == 200, path


async def test_the_stand_in_has_the_platforms_own_checks(stand_in: Client) -> None:
    for path in ("/healthz", "/readyz"):
        assert (await stand_in.http.get(path)).status_code == 200, path


async def test_metrics_have_sglangs_names(engine: EngineClient) -> None:
    await engine.generate(input_ids=PROMPT)
    exposed = (await engine.http.get("/metrics")).text
    for name in (
        "num_running_reqs",
        "num_queue_reqs",
        "token_usage",
        "gen_throughput",
        "cache_hit_rate",
        "prompt_tokens_total",
        "generation_tokens_total",
        "cached_tokens_total",
        "num_requests_total",
        "num_aborted_requests_total",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_bucket",
        "queue_time_seconds_bucket",
        "max_total_num_tokens",
    ):
        assert f"\nsglang:{name}{{" in exposed, name


async def test_a_duplicate_live_rid_is_a_400(engine: EngineClient) -> None:
    stream = engine.stream(input_ids=PROMPT, rid="twice", sampling_params=LONG)
    await anext(stream)
    assert (await engine.http.post("/generate", json={"input_ids": [1], "rid": "twice"})).status_code == 400
    await engine.control("/abort_request", rid="twice")
    assert [chunk async for chunk in stream][-1]["meta_info"]["finish_reason"]["type"] == "abort"


async def test_an_abort_answers_200_with_what_there_is(engine: EngineClient) -> None:
    stream = engine.stream(input_ids=PROMPT, rid="stop-me", return_logprob=True, sampling_params=LONG)
    await anext(stream)
    complete = asyncio.create_task(engine.generate(input_ids=PROMPT, rid="leave-me", sampling_params=LONG))
    for rid in ("stop-m", "unknown", "stop-me"):
        assert (await engine.control("/abort_request", rid=rid)).status_code == 200
    last = [chunk async for chunk in stream][-1]
    assert checked(last)["meta_info"]["finish_reason"]["message"] == "Aborted"
    assert 0 < len(last["output_ids"]) == len(last["meta_info"]["output_token_logprobs"]) < 1500
    assert not complete.done()
    await engine.control("/abort_request", abort_all=True)
    assert checked(await complete)["meta_info"]["finish_reason"]["type"] == "abort"


async def test_an_abort_in_the_queue_has_no_prompt_counts(engine: EngineClient) -> None:
    streams = [engine.stream(input_ids=PROMPT, sampling_params=LONG) for _ in range(RUNNING_REQUESTS)]
    for stream in streams:
        await anext(stream)
    queued = asyncio.create_task(engine.generate(input_ids=PROMPT, rid="waits"))
    await engine.reach(running=RUNNING_REQUESTS, waiting=1)
    await engine.control("/abort_request", rid="waits")
    answer = checked(await queued)
    assert answer["output_ids"] == []
    assert answer["meta_info"]["finish_reason"]["message"] == "Abort in waiting queue"
    assert not {"prompt_tokens", "cached_tokens"} & set(answer["meta_info"])
    await engine.control("/abort_request", abort_all=True)
    for stream in streams:
        assert [chunk async for chunk in stream]


async def test_a_disconnected_clients_request_is_aborted(engine: EngineClient) -> None:
    stream = engine.stream(input_ids=PROMPT, rid="gone", sampling_params=LONG)
    await anext(stream)
    await stream.aclose()
    await engine.reach(running=0, waiting=0)
    waiting = asyncio.create_task(engine.generate(input_ids=PROMPT, rid="gone-too", sampling_params=LONG))
    await engine.reach(running=1, waiting=0)
    waiting.cancel()
    await engine.reach(running=0, waiting=0)
    several = engine.stream(input_ids=PROMPT, rid="gone-all", sampling_params={**LONG, "n": 4})
    await anext(several)
    await several.aclose()
    await engine.reach(running=0, waiting=0)


async def test_many_at_once_are_all_answered(engine: EngineClient) -> None:
    bodies = [
        {"input_ids": [*range(100, 100 + size)], "sampling_params": {"max_new_tokens": 5}} for size in range(1, 65)
    ]
    answers = await asyncio.gather(*(engine.generate(**body) for body in bodies))
    assert [checked(answer)["meta_info"]["prompt_tokens"] for answer in answers] == list(range(1, 65))
