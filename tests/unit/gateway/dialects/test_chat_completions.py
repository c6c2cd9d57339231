"""Limits of a body, which hold before it is parsed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from leyden.services.gateway.dialects.chat_completions import MAX_VALUES, ChatCompletions
from leyden.services.gateway.errors import BadRequest


def body(*contents: str, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": content} for content in contents]
    return json.dumps({"model": "m", "messages": messages, **fields}).encode()


@pytest.mark.parametrize(
    "fields", [{"metadata": [[]] * MAX_VALUES}, {"tools": [{}] * MAX_VALUES}, {"stop": [0] * 200_000}]
)
def test_a_body_of_more_values_than_can_be_read_in_a_moment_is_refused_unread(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="more than 100000 values") as refused:
        # The body is broken at its end, which nobody reads.
        ChatCompletions().parse(body("hi", **fields) + b"!", max_choices=1)
    assert refused.value.code == "too_many_values"


@pytest.mark.parametrize(
    "text", ["1, " * 2 * MAX_VALUES, '[{"a\\":[1,2' * MAX_VALUES, '\\"' * MAX_VALUES + "," * MAX_VALUES]
)
def test_brackets_and_commas_inside_strings_are_not_counted(text: str) -> None:
    [turn] = ChatCompletions().parse(body(text), max_choices=1).turns
    assert turn.content == text
