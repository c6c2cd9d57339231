"""The gateway's requests and the scripted engine's answers conform to SGLang's own types."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from leyden.services.gateway.calls.context import seed_of_call, seed_of_rollout
from tests.fakes.gateway import scene
from tests.fakes.sglang_types import api_types

EVERYTHING: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "logit_bias": {"5": 1, "6": -2.5},
    "stop": ["a", "b"],
    "seed": -3,
    "logprobs": True,
    "top_logprobs": 2,
    "max_tokens": 5,
    "extra_body": {"top_k": 5, "min_p": 0.1, "min_tokens": 2, "repetition_penalty": 1.1},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("parameters", [{}, EVERYTHING])
async def test_requests_and_answers_are_sglangs(tmp_path, database, parameters, stream):
    types = api_types()
    async with scene(tmp_path, database) as stage, stage.client() as client:
        create: Any = client.chat.completions.create
        answer = await create(model="m", messages=[{"role": "user", "content": "hi"}], stream=stream, **parameters)
        if stream:
            assert [chunk async for chunk in answer]
        (asked,) = stage.engine.requests
        async with httpx.AsyncClient() as http:
            told = (await http.post(f"{stage.engine.url}/generate", json={**asked, "stream": False})).json()
    request = types.GenerateRequest.from_json_value(asked)
    response = types.GenerateResponse.from_json_value(told)
    assert request.return_logprob
    # A negative seed of OpenAI's is one of SGLang's.
    seed = seed_of_rollout(-3, stage.rollout_id) if parameters else seed_of_call(asked["rid"])
    assert request.sampling_params.sampling_seed == seed
    assert response.meta_info.weight_versions[0].version == f"{stage.run_id}:0"
    assert len(response.meta_info.output_token_logprobs) == len(response.output_ids)
