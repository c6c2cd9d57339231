"""Constrained decoding on a random model: every answer follows its grammar."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.tiny_engine import Client, served_engine

PROMPT = [72, 69, 76, 76, 79]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "nights": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "nights"],
    "additionalProperties": False,
}


def tag(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": arguments}
    return {"type": "tag", "begin": f'<call>{{"name": "{name}", "arguments": ', "content": content, "end": "}</call>"}


def structural(form: dict[str, Any]) -> dict[str, Any]:
    return {"max_new_tokens": 500, "structural_tag": json.dumps({"type": "structural_tag", "format": form})}


@pytest.fixture(scope="module")
async def engine(tiny_model: Path) -> AsyncIterator[Client]:
    async with served_engine(tiny_model, weight_version="run-a:0") as client:
        yield client


@pytest.mark.parametrize("extra", [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"temperature": 2.0, "sampling_seed": 3}])
async def test_a_random_model_follows_a_schema(engine: Client, extra: dict[str, Any]) -> None:
    sampling = {"max_new_tokens": 200, "json_schema": json.dumps(SCHEMA), "n": 4, **extra}
    answers = await engine.generate(input_ids=PROMPT, sampling_params=sampling)
    for answer in answers:
        found = json.loads(answer["text"])
        assert found["city"] in {"Oslo", "Rome"} and 1 <= found["nights"] <= 9
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"


async def test_logprobs_are_of_the_masked_distribution_and_alternatives_finite(engine: Client) -> None:
    sampling = {"max_new_tokens": 200, "json_schema": json.dumps(SCHEMA)}
    answer = await engine.generate(
        input_ids=PROMPT, sampling_params=sampling, return_logprob=True, top_logprobs_num=3, token_ids_logprob=[5]
    )
    logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    # `{` is the only token that may come first; between the cities there is a choice.
    assert logprobs[0] == 0.0 and min(logprobs) < -0.01
    first = answer["meta_info"]["output_top_logprobs"][0]
    assert first[0][0] == 0.0 and first[1][0] < -1e38
    assert answer["meta_info"]["output_token_ids_logprobs"][0][0][0] < -1e38


async def test_constrained_and_free_sequences_share_a_batch(engine: Client) -> None:
    sampling = [{"max_new_tokens": 200, "json_schema": json.dumps(SCHEMA)}, {"max_new_tokens": 50, "ignore_eos": True}]
    constrained, free = await engine.generate(input_ids=[PROMPT, PROMPT], sampling_params=sampling)
    assert json.loads(constrained["text"])
    assert len(free["output_ids"]) == 50


async def test_calls_of_a_structural_tag(engine: Client) -> None:
    tags = [tag("book", SCHEMA), tag("cancel", {"type": "object", "properties": {}, "additionalProperties": False})]
    form = {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True}
    many = {**structural(form), "n": 8}
    one = {**structural({**form, "stop_after_first": True}), "n": 8}
    numbers = []
    for answer in await engine.generate(input_ids=PROMPT, sampling_params=many):
        calls = [json.loads(call) for call in re.findall(r"<call>(.*?)</call>", answer["text"])]
        assert {call["name"] for call in calls} <= {"book", "cancel"}
        numbers.append(len(calls))
    assert min(numbers) >= 1 and max(numbers) > 1
    for answer in await engine.generate(input_ids=PROMPT, sampling_params=one):
        assert answer["text"].count("<call>") == 1
    either = {"type": "or", "elements": [{"type": "json_schema", "json_schema": SCHEMA}, form]}
    texts = [
        answer["text"]
        for answer in await engine.generate(input_ids=PROMPT, sampling_params={**structural(either), "n": 16})
    ]
    assert {text[0] for text in texts} == {"<", "{"}


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"json_schema": "{"}, "a grammar must be JSON"),
        ({"json_schema": '{"type": "objec"}'}, "Invalid type: objec"),
        ({"json_schema": '{"not": {"const": 1}}'}, "Unimplemented keys"),
        ({"json_schema": "[]"}, "'json_schema' is wrong or not supported"),
        ({"json_schema": "{}", "min_new_tokens": 2}, "min_new_tokens excludes a grammar"),
        (structural({"type": "triggered_tags", "tags": []}), "'triggered_tags' is wrong or not supported"),
        ({"structural_tag": "[]"}, "None is wrong or not supported"),
    ],
)
async def test_a_grammar_that_cannot_be_served_is_a_400(engine: Client, sampling: dict[str, Any], message: str) -> None:
    answer = await engine.http.post("/generate", json={"input_ids": PROMPT, "sampling_params": sampling})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
