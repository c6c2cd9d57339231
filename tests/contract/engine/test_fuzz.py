"""The CPU engine answers any request as its OpenAPI document declares, and never with a 500."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from schemathesis import GenerationMode

from leyden.services.engine.app import create_engine_app
from leyden.services.engine.request import SamplingParams
from leyden.services.engine.settings import Settings
from tests.fakes.fuzzing import bounded, check, operations, schema_of
from tests.fakes.served import served

ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("Cs",)), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["0", "stop", "x"]), inner, max_size=3),
    max_leaves=4,
)
SMALL = st.sampled_from([{"max_new_tokens": 1}, {"max_new_tokens": 2, "temperature": 0}, {}])


@pytest.fixture(scope="module")
def application(tiny_model: Path) -> Any:
    return create_engine_app(Settings(model_path=tiny_model, threads=1, max_total_tokens=2048, seed=0))


@pytest.fixture(scope="module")
def url(application: Any) -> Iterator[str]:
    with served(application) as address:
        yield address


def test_every_route_conforms_to_its_openapi_document(application: Any, url: str) -> None:
    for operation in operations(schema_of(application.openapi())):
        _send_to(operation, url)
    # Whatever was asked last, the engine is not left paused.
    assert httpx.post(f"{url}/continue_generation", json={}, timeout=60).status_code == 200


def _send_to(operation: Any, url: str) -> None:
    @bounded(15)
    @given(st.data())
    def send(data: st.DataObject) -> None:
        case = data.draw(operation.as_strategy(generation_mode=data.draw(st.sampled_from(list(GenerationMode)))))
        if "timeout" in (case.query or {}):
            case.query = {}
        # The protocol is SGLang's: it refuses with 400, and answers with nothing where FastAPI's document says JSON.
        unlike = ("status_code_conformance", "response_schema_conformance", "content_type_conformance")
        check(case, url, {}, but=unlike)

    send()


def test_generate_answers_or_refuses_any_request(url: str) -> None:
    prompts = st.lists(st.integers(0, 200), min_size=1, max_size=4) | ODD
    sampling = st.fixed_dictionaries({}, optional=dict.fromkeys(SamplingParams.model_fields, ODD))
    fields = ("rid", "text", "return_logprob", "logprob_start_len", "top_logprobs_num", "extra_key")
    fields += ("token_ids_logprob", "stream", "return_prompt_token_ids", "cache_salt", "return_text_in_logprobs")
    bodies = st.fixed_dictionaries(
        {"input_ids": prompts, "sampling_params": SMALL | sampling},
        optional=dict.fromkeys(fields, ODD),
    )

    with httpx.Client(base_url=url, timeout=60) as http:

        @bounded(150)
        @given(bodies)
        def ask(body: dict[str, Any]) -> None:
            # A long answer is no error, and takes long.
            if body["sampling_params"].get("max_new_tokens") not in (1, 2):
                body["sampling_params"]["max_new_tokens"] = 2
            body["sampling_params"]["min_new_tokens"] = 0
            answer = http.post("/generate", content=orjson.dumps(body))
            assert answer.status_code in (200, 400), answer.text
            if answer.status_code == 400:
                assert answer.json()["error"]["message"]

        ask()
        healthy = http.post("/generate", json={"input_ids": [1], "sampling_params": {"max_new_tokens": 1}})
        assert (healthy.status_code, len(healthy.json()["output_ids"])) == (200, 1)
        assert math.isfinite(http.get("/v1/loads").json()["loads"][0]["token_usage"])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"{",
        b"[" * 100_000,
        b'{"input_ids": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"text": "\\ud800"}',
        b'{"text": "\xff"}',
        b'{"input_ids": [1e999]}',
        b'{"input_ids": [' + b"9" * 400 + b"]}",
        b'{"input_ids": [-1]}',
        b'{"input_ids": [1000000]}',
        b'{"input_ids": []}',
        b'{"input_ids": [[], [1]]}',
        b'{"text": []}',
        b'{"text": ["a", 1]}',
        b'{"text": "a", "sampling_params": {"logit_bias": {"5": 1e308}}}',
        b'{"text": "a", "sampling_params": {"logit_bias": {"' + b"9" * 5000 + b'": 1}}}',
        b'{"text": "a", "sampling_params": {"sampling_seed": -99999999999999999999}}',
    ],
    ids=lambda body: repr(body[:50]),
)
def test_garbage_is_refused_and_the_engine_continues(url: str, body: bytes) -> None:
    with httpx.Client(base_url=url, timeout=60) as http:
        refused = http.post("/generate", content=body)
        assert (refused.status_code, bool(refused.json()["error"]["message"])) == (400, True), refused.text
        healthy = http.post("/generate", json={"input_ids": [1], "sampling_params": {"max_new_tokens": 1}})
        assert healthy.status_code == 200


def test_a_tiny_temperature_means_greedy_decoding(url: str) -> None:
    with httpx.Client(base_url=url, timeout=60) as http:
        answers = [
            http.post("/generate", json={"input_ids": [7], "sampling_params": {"max_new_tokens": 4, "temperature": t}})
            for t in (0, 1e-320, 1e-7)
        ]
    assert [answer.json()["output_ids"] for answer in answers] == [answers[0].json()["output_ids"]] * 3
