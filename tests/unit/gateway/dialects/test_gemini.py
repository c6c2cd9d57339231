from __future__ import annotations

from typing import Any, cast

import pytest

from leyden.services.gateway.dialects.gemini.contents import Content, FunctionCall, FunctionResponse, Part, turns_of
from leyden.services.gateway.dialects.gemini.dialect import Gemini
from leyden.services.gateway.dialects.gemini.schema import json_schema


class Compared(str):
    """A text that counts how often it is compared."""

    __slots__ = ()
    times = 0

    def __eq__(self, other: object) -> bool:
        Compared.times += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def conversation(calls: list[dict[str, Any]], responses: list[dict[str, Any]]) -> list[Content]:
    # Built past their checks, which make plain texts of the compared ones.
    made = [
        [Part.model_construct(function_call=FunctionCall.model_construct(**one)) for one in calls],
        [Part.model_construct(function_response=FunctionResponse.model_construct(**one)) for one in responses],
    ]
    return [
        Content.model_construct(role=role, parts=parts) for role, parts in zip(("model", "user"), made, strict=True)
    ]


@pytest.mark.parametrize("field", ["id", "name"])
def test_many_results_are_matched_with_a_comparison_or_two_each(field: str) -> None:
    calls = [{"id": f"a{number}", "name": f"a{number}"} for number in range(400)]
    responses = [{"id": None, "name": one["name"]} | {field: Compared(one["id"])} for one in reversed(calls)]
    Compared.times = 0
    turns = list(turns_of(conversation(calls, responses)))
    assert [turn.tool_call_id for turn in turns[1:]] == [one["id"] for one in reversed(calls)]
    assert Compared.times <= 10 * len(calls)


def test_a_result_is_for_the_call_with_its_id_or_the_first_open_one_of_its_function() -> None:
    calls = [{"id": number, "name": "f"} for number in ("1", "2", "3")]
    answered: list[dict[str, Any]] = [{"id": number, "name": "f"} for number in ("2", None, None, None, "4")]
    turns = list(turns_of(conversation(calls, answered)))
    assert [turn.tool_call_id for turn in turns[1:]] == ["2", "1", "3", None, "4"]


@pytest.mark.parametrize("value", [{}, [], None, 5])
def test_a_format_that_is_no_text_stays_as_it_is(value: object) -> None:
    schema = {"type": "OBJECT", "properties": {"a": {"type": "STRING", "format": value}}}
    assert json_schema(cast("dict[str, Any]", schema))["properties"] == {"a": {"type": "string", "format": value}}


def test_an_empty_stop_sequence_stops_nothing() -> None:
    body = b'{"contents": [{"parts": [{"text": "hi"}]}], "generationConfig": {"stopSequences": ["", "a"]}}'
    assert Gemini("m").parse(body, max_choices=1).sampling.stop == ("a",)
