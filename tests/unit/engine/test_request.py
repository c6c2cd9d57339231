from __future__ import annotations

from typing import Any

import pytest

from leyden.services.engine.errors import BadRequest
from leyden.services.engine.request import parse_generate


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "either text or input_ids"),
        ({"text": "a", "input_ids": [1]}, "either text or input_ids"),
        ({"text": []}, "batch is empty"),
        ({"input_ids": [1.5]}, "must be integers"),
        ({"input_ids": "ab"}, "must be a list of integers"),
        ({"text": "a", "stream": "yes"}, "stream must be true or false"),
        ({"text": "a", "lora_path": 1}, "lora_path"),
        ({"text": "a", "sampling_params": {"regex": "a+"}}, "regex is not supported"),
        ({"text": "a", "sampling_params": {"bogus": 1}}, "unknown field `bogus`, expected one of `max_new_tokens`"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"max_new_tokens": "many"}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"top_k": 0}}, "top_k"),
        ({"text": ["a", "b"], "return_logprob": [True]}, "1 entries for 2 prompts"),
        ({"text": "a", "rid": ["a", "b"]}, "rid must be"),
        ([], "JSON object"),
    ],
)
def test_wrong_requests_are_refused_with_the_remedy(body: Any, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        parse_generate(body)


def test_unknown_top_level_fields_and_nulls_are_ignored() -> None:
    request = parse_generate({"text": "a", "whatever": 1, "sampling_params": {"stop": None, "temperature": None}})
    assert request.prompts[0].sampling.temperature == 1.0


def test_a_batch_parameter_is_one_value_or_a_list() -> None:
    request = parse_generate(
        {
            "input_ids": [[1], [2, 3]],
            "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 2, "stop": "x"}],
            "logprob_start_len": [0, -1],
            "return_logprob": True,
            "rid": "r",
        }
    )
    first, second = request.prompts
    assert (first.input_ids, second.input_ids, first.rid, second.rid) == ([1], [2, 3], "r_0", "r_1")
    assert (first.sampling.max_new_tokens, second.sampling.max_new_tokens, second.sampling.stop) == (1, 2, ["x"])
    assert (first.logprob_start_len, second.logprob_start_len, second.return_logprob) == (0, -1, True)
